// Kernels: those in torch's libraries, which register themselves when they are loaded, and those that Triton compiles.
// They compute nothing and are counted by name.
#include "device.h"
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- registered kernels: the address of the host's stub -> name ----

typedef struct {
    const void *stub;
    const char *name; // stands in torch's library
} Kernel;

static Kernel *kernels;
static size_t n_kernels, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Kernel *slot_of(const void *stub) {
    size_t at = ((uintptr_t)stub >> 4) * 11400714819323198485ull % room; // Knuth's multiplier, 2^64 / golden ratio
    while (kernels[at].stub && kernels[at].stub != stub) at = (at + 1) % room;
    return &kernels[at];
}

static void grow(void) {
    Kernel *before = kernels;
    size_t n = room;
    room = room ? 2 * room : 1 << 16;
    kernels = calloc(room, sizeof *kernels);
    for (size_t i = 0; i < n; i++)
        if (before[i].stub) *slot_of(before[i].stub) = before[i];
    free(before);
}

void __cudaRegisterFunction(
    void **module, const char *stub, char *device_function, const char *name, int limit, uint3 *thread, uint3 *block,
    dim3 *block_dim, dim3 *grid_dim, int *warp) {
    pthread_mutex_lock(&lock);
    if (2 * (n_kernels + 1) > room) grow();
    Kernel *at = slot_of(stub);
    if (!at->stub) n_kernels++;
    *at = (Kernel){stub, name};
    pthread_mutex_unlock(&lock);
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *module;
    return &module;
}
void __cudaRegisterFatBinaryEnd(void **module) {}
void __cudaUnregisterFatBinary(void **module) {}
char __cudaInitModule(void **module) { return 1; }
void __cudaRegisterVar(void **m, char *host, char *dev, const char *n, int ext, size_t size, int constant, int global) {}
void __cudaRegisterManagedVar(void **m, void **at, char *dev, const char *n, int ext, size_t size, int c, int global) {}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = (void *)symbol;
    return cudaSuccess;
}

// ---- launches ----

static cudaError_t launch(const void *stub) {
    const char *name = "not registered";
    pthread_mutex_lock(&lock);
    if (room && slot_of(stub)->stub) name = slot_of(stub)->name;
    pthread_mutex_unlock(&lock);
    count("kernel", name, 0);
    return cudaSuccess;
}

// `kernel<<<...>>>(...)` first pushes its sizes, and the stub of the kernel takes them off.
typedef struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} Sizes;
static __thread Sizes pushed[16];
static __thread unsigned depth;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    pushed[depth++ % 16] = (Sizes){grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    Sizes sizes = pushed[--depth % 16];
    *grid = sizes.grid, *block = sizes.block, *shared = sizes.shared, *(void **)stream = sizes.stream;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch(stub);
}

cudaError_t cudaLaunchCooperativeKernel(
    const void *stub, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch(stub);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *sizes, const void *stub, void **args) { return launch(stub); }

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
    *kernel = (cudaKernel_t)stub;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return launch((const void *)kernel);
}

// ---- what a kernel needs: sizes that every launch fits ----

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *told, const void *stub) {
    memset(told, 0, sizeof *told);
    told->maxThreadsPerBlock = 1024;
    told->numRegs = 32;
    told->ptxVersion = told->binaryVersion = 90;
    told->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *stub, enum cudaFuncAttribute what, int value) { return cudaSuccess; }

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute what, int value, int device) {
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *stub, int size, size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *stub, int size, size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

// ---- kernels that were compiled at run time: a function is its name ----

static CUresult new_module(CUmodule *module) {
    count("call", "cuModuleLoad", 0);
    *module = malloc(1);
    return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) { return new_module(module); }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return new_module(module); }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values) {
    return new_module(module);
}

CUresult cuModuleUnload(CUmodule module) {
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name);
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute wanted, CUfunction function) {
    *value = wanted == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : wanted == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute what, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int size, size_t shared) {
    *blocks = 2;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *sizes) {
    *clusters = 66;
    return CUDA_SUCCESS;
}

static CUresult launch_compiled(CUfunction function) {
    count("triton", (const char *)function, 0);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(
    CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    CUstream stream, void **args, void **extra) {
    return launch_compiled(function);
}

CUresult cuLaunchCooperativeKernel(
    CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    CUstream stream, void **args) {
    return launch_compiled(function);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *sizes, CUfunction function, void **args, void **extra) {
    return launch_compiled(function);
}

CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    return CUDA_SUCCESS; // only kernels read it
}
