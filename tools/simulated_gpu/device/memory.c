// Memory of the device and locked memory of the host, both pages of this process that the system gives when touched: an
// 80 GB device fits a small host, because kernels touch nothing.
#include "device.h"
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef enum { DEVICE, HOST } Place;
typedef struct {
    char *base;
    size_t size;
    Place place;
    int device;
} Range;

static Range *ranges;
static int n_ranges, room;
static size_t in_use[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- which address is what ----

static void add_range(void *base, size_t size, Place place) {
    pthread_mutex_lock(&lock);
    if (n_ranges == room) ranges = realloc(ranges, sizeof(Range) * (size_t)(room = room ? 2 * room : 256));
    ranges[n_ranges++] = (Range){base, size, place, this_device()};
    pthread_mutex_unlock(&lock);
}

static Range drop_range(const void *base) {
    Range dropped = {0};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_ranges && !dropped.base; i++)
        if (ranges[i].base == base) dropped = ranges[i], ranges[i] = ranges[--n_ranges];
    pthread_mutex_unlock(&lock);
    return dropped;
}

static Range range_of(const void *address) {
    Range range = {0};
    const char *at = address;
    pthread_mutex_lock(&lock);
    for (int i = n_ranges - 1; i >= 0 && !range.base; i--) // what is asked for is mostly young
        if (at >= ranges[i].base && at < ranges[i].base + ranges[i].size) range = ranges[i];
    pthread_mutex_unlock(&lock);
    return range;
}

bool on_device(const void *address) {
    Range range = range_of(address);
    return range.base && range.place == DEVICE;
}

bool locked(const void *address) {
    Range range = range_of(address);
    return range.base && range.place == HOST;
}

size_t bytes_in_use(int device) { return in_use[device]; }

static bool take(int device, size_t size) {
    pthread_mutex_lock(&lock);
    bool fits = in_use[device] + size <= device_bytes();
    if (fits) in_use[device] += size;
    pthread_mutex_unlock(&lock);
    return fits;
}

static void give(int device, size_t size) {
    pthread_mutex_lock(&lock);
    in_use[device] -= size;
    pthread_mutex_unlock(&lock);
}

static void *pages(size_t size, int protection) {
    void *base = mmap(NULL, size ? size : 1, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return base == MAP_FAILED ? NULL : base;
}

// ---- plain allocations ----

cudaError_t cudaMalloc(void **address, size_t size) {
    count("call", "cudaMalloc", size);
    if (!take(this_device(), size)) return cudaErrorMemoryAllocation;
    if (!(*address = pages(size, PROT_READ | PROT_WRITE))) {
        give(this_device(), size);
        return cudaErrorMemoryAllocation;
    }
    add_range(*address, size, DEVICE);
    return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
    Range range = drop_range(address);
    if (!range.base) return cudaSuccess;
    host_waits("cudaFree"); // the driver waits for all that runs
    munmap(range.base, range.size);
    give(range.device, range.size);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream) { return cudaMalloc(address, size); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }

cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
    count("call", "cudaHostAlloc", size);
    if (!(*address = pages(size, PROT_READ | PROT_WRITE))) return cudaErrorMemoryAllocation;
    add_range(*address, size, HOST);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
    Range range = drop_range(address);
    if (range.base) munmap(range.base, range.size);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    count("call", "cudaHostRegister", size);
    add_range(address, size, HOST);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
    drop_range(address);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *all) {
    *all = device_bytes();
    *unused = *all - in_use[this_device()];
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *told, const void *address) {
    Range range = range_of(address);
    memset(told, 0, sizeof *told);
    told->device = -2; // what the runtime says of memory it does not know
    if (!range.base) return cudaSuccess;
    told->device = range.device;
    told->type = range.place == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    told->devicePointer = (void *)address;
    if (range.place == HOST) told->hostPointer = (void *)address;
    return cudaSuccess;
}

CUresult cuPointerGetAttribute(void *told, CUpointer_attribute wanted, CUdeviceptr address) {
    Range range = range_of((void *)address);
    if (wanted == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)told = address;
    else if (wanted == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)told = range.base && range.place == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else return CUDA_ERROR_NOT_SUPPORTED;
    return range.base ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// ---- addresses first and memory later: torch's expandable segments ----

CUresult cuMemGetAllocationGranularity(
    size_t *size, const CUmemAllocationProp *of, CUmemAllocationGranularity_flags which) {
    *size = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t aligned, CUdeviceptr near, unsigned long long f) {
    char *base = pages(size + GRANULE, PROT_NONE); // of which the aligned part is used
    if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
    base = (char *)(((uintptr_t)base + GRANULE - 1) & ~(GRANULE - 1));
    add_range(base, size, DEVICE);
    *address = (CUdeviceptr)base;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    drop_range((void *)address);
    munmap((void *)address, size);
    return CUDA_SUCCESS;
}

// A handle is its size, whose low bits are free for the device.
CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *of, unsigned long long flags) {
    count("call", "cuMemCreate", size);
    int device = of->location.id;
    if (!take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = size | (unsigned)device;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    give((int)(handle % DEVICES), handle - handle % DEVICES);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr a, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags) {
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t n) {
    return mprotect((void *)address, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    host_waits("cuMemUnmap");
    madvise((void *)address, size, MADV_DONTNEED);
    mprotect((void *)address, size, PROT_NONE);
    return CUDA_SUCCESS;
}
