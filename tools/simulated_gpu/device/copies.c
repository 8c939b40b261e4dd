// Copies and fills. Small ones happen, so that indices, seeds and lengths are right; of large ones nothing is touched,
// because a model of real size would then take real memory, and no kernel has written what they would carry.
#include "device.h"
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define MOVED (1ul << 20) // bytes of the largest copy that happens
#define SCALARS 4096      // bytes of the largest copy that the host may read as numbers

// Memory that no kernel has written still holds what was there before, which as a float may be infinite or no number: a
// loss that stops the run. As zeros it does not.
static void make_finite(void *to, size_t size) {
    if (size > SCALARS) return;
    uint32_t word;
    for (size_t at = 0; at + sizeof word <= size; at += sizeof word) {
        memcpy(&word, (char *)to + at, sizeof word);
        if ((word & 0x7f800000u) == 0x7f800000u) {
            memset(to, 0, size);
            return;
        }
    }
}

static cudaError_t copy(void *to, const void *from, size_t size, bool at_once) {
    bool out_of = on_device(from), into = on_device(to);
    bool pageable = out_of != into && !locked(out_of ? to : from);
    const char *direction = out_of ? (into ? "device to device" : "device to host") : into ? "host to device" : "host";
    char name[64];
    snprintf(name, sizeof name, "%s%s", direction, pageable ? ", pageable" : "");
    count("copy", name, size);
    if (size <= MOVED) {
        memmove(to, from, size);
        if (out_of && !into) make_finite(to, size);
    }
    // To pageable memory the driver copies itself, so the host waits for all that the stream still does. From it the
    // driver first takes a copy, and the host goes on.
    if (at_once || (pageable && out_of)) {
        char what[80];
        snprintf(what, sizeof what, "copy %s", name);
        host_waits(what);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return copy(to, from, size, true);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, size, false);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream) {
    return copy(to, from, size, false);
}

cudaError_t cudaMemcpyToSymbol(const void *to, const void *from, size_t n, size_t at, enum cudaMemcpyKind kind) {
    return cudaSuccess; // only kernels read it
}

static cudaError_t fill(void *to, int value, size_t size) {
    count("fill", "cudaMemset", size);
    if (size <= MOVED) memset(to, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t size) { return fill(to, value, size); }
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { return fill(to, value, size); }

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t n, CUstream stream) {
    count("fill", "cuMemsetD32Async", 4 * n);
    if (4 * n <= MOVED)
        for (size_t i = 0; i < n; i++) ((unsigned *)to)[i] = value;
    return CUDA_SUCCESS;
}
