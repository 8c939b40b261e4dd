/* Another time of day for a process and all that it starts: OTHER_CLOCK seconds are added to CLOCK_REALTIME, whoever in
   the process asks for it. The kernel cannot do this: a time namespace shifts only the clocks since boot. The times at
   which a wait ends, which the kernel compares with its own clock, are shifted back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift;

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("OTHER_CLOCK");
    if (text) shift = atol(text);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real) real = REAL(clock_gettime);
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI)) now->tv_sec += shift;
    return result;
}

int timespec_get(struct timespec *now, int base) { return clock_gettime(CLOCK_REALTIME, now) ? 0 : base; }

int gettimeofday(struct timeval *now, void *zone) {
    int result = REAL(gettimeofday)(now, zone);
    if (!result) now->tv_sec += shift;
    return result;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

/* A time since boot is small: only one of the time of day is as large as this. */
static const struct timespec *back(const struct timespec *until, struct timespec *shifted) {
    *shifted = *until;
    if (until->tv_sec > 300000000) shifted->tv_sec -= shift;
    return shifted;
}

static void *newest(const char *name) { /* of its two versions on x86 */
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static __typeof__(&pthread_cond_timedwait) real;
    struct timespec shifted;
    if (!real) real = newest("pthread_cond_timedwait");
    return real(condition, mutex, back(until, &shifted));
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until) {
    struct timespec shifted;
    return REAL(pthread_cond_clockwait)(condition, mutex, clock, back(until, &shifted));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
    struct timespec shifted;
    return REAL(pthread_mutex_timedlock)(mutex, back(until, &shifted));
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    struct timespec shifted;
    return REAL(sem_timedwait)(semaphore, back(until, &shifted));
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *until) {
    struct timespec shifted;
    return REAL(sem_clockwait)(semaphore, clock, back(until, &shifted));
}
