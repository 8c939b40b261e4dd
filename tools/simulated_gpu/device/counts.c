// How often each thing was asked for, and of how many bytes.
#include "device.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS 16384 // more than there are names in any run; a full table is an error of this file

typedef struct {
    const char *kind; // one of the few literals below us, never freed
    char *name;
    long calls, bytes;
} Count;

static Count counts[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*wait_hook)(const char *);
static __thread bool idle; // whether this thread has asked for nothing since it last waited

static Count *slot_of(const char *kind, const char *name) {
    unsigned long hash = 5381;
    for (const char *c = name; *c; c++) hash = hash * 33 + (unsigned char)*c;
    for (unsigned long i = 0; i < SLOTS; i++) {
        Count *at = &counts[(hash + i) % SLOTS];
        if (!at->name || (!strcmp(at->name, name) && !strcmp(at->kind, kind))) return at;
    }
    fprintf(stderr, "simulated GPU: more than %d names\n", SLOTS);
    abort();
}

void count(const char *kind, const char *name, size_t bytes) {
    idle = false;
    pthread_mutex_lock(&lock);
    Count *at = slot_of(kind, name);
    if (!at->name) *at = (Count){kind, strdup(name), 0, 0};
    at->calls++;
    at->bytes += (long)bytes;
    pthread_mutex_unlock(&lock);
}

void host_waits(const char *what) {
    count("wait", what, 0);
    if (wait_hook) wait_hook(what); // takes Python's own lock, so ours must be free
    idle = true;
}

bool nothing_to_wait_for(void) { return idle; }

// ---- for ctypes ----

void simulated_gpu_on_wait(void (*hook)(const char *)) { wait_hook = hook; }

void simulated_gpu_reset(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++) free(counts[i].name);
    memset(counts, 0, sizeof counts);
    pthread_mutex_unlock(&lock);
}

// Writes lines of kind, calls, bytes and name, with tabs between. Returns whether it could.
int simulated_gpu_write(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) return 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++)
        if (counts[i].name)
            fprintf(file, "%s\t%ld\t%ld\t%s\n", counts[i].kind, counts[i].calls, counts[i].bytes, counts[i].name);
    pthread_mutex_unlock(&lock);
    return fclose(file) == 0;
}
