// What the parts of the simulated device share.
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>

#define DEVICES 16         // at most
#define GRANULE (2ul << 20) // bytes; physical memory comes in multiples of it

// counts.c
void count(const char *kind, const char *name, size_t bytes);
void host_waits(const char *what); // counts it and tells the Python side, which looks up the line; hold no lock
bool nothing_to_wait_for(void); // since this thread's last wait

// memory.c
bool on_device(const void *address);
bool locked(const void *address); // memory of the host whose pages cannot move, so copies need no wait
size_t bytes_in_use(int device);

// properties.c
int device_count(void);
size_t device_bytes(void);
int this_device(void);
void *own_symbol(const char *name); // what stands in this library under the name, or under it with "_v2"
