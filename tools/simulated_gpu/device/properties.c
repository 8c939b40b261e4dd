// What the device says of itself: an H100. SIMULATED_GPU_COUNT, _NAME, _GIB and _CAPABILITY (90) say otherwise.
#include "device.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread int current;
static __thread cudaError_t last;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

int this_device(void) { return current; }

int device_count(void) {
    int n = atoi(setting("SIMULATED_GPU_COUNT", DEVICES_SEEN));
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible) {
        int seen = *visible != 0;
        for (; *visible; visible++) seen += *visible == ',';
        if (seen < n) n = seen;
    }
    return n < DEVICES ? n : DEVICES;
}

size_t device_bytes(void) {
    static size_t bytes;
    if (!bytes) bytes = (size_t)(atof(setting("SIMULATED_GPU_GIB", "79.2")) * (1ul << 30));
    return bytes;
}

static const char *device_name(void) { return setting("SIMULATED_GPU_NAME", "NVIDIA H100 80GB HBM3"); }
static int capability(void) { return atoi(setting("SIMULATED_GPU_CAPABILITY", "90")); }

static cudaError_t refuse(cudaError_t error) { return last = error; }

// ---- which device ----

cudaError_t cudaGetDeviceCount(int *n) {
    *n = device_count();
    return *n ? cudaSuccess : refuse(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return refuse(cudaErrorInvalidDevice);
    current = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int other) {
    *can = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int device, unsigned flags) { return cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char *id, int room, int device) {
    snprintf(id, (size_t)room, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

// ---- errors and versions ----

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last;
    last = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last; }

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : error == cudaErrorMemoryAllocation ? "out of memory" : "not simulated";
}

const char *cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error); // both number success and out of memory 0 and 2
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

static int version(int *told) {
    *told = CUDART_VERSION; // of the headers, which are those of Triton's wheel
    return 0;
}

cudaError_t cudaDriverGetVersion(int *told) { return (cudaError_t)version(told); }
cudaError_t cudaRuntimeGetVersion(int *told) { return (cudaError_t)version(told); }
CUresult cuDriverGetVersion(int *told) { return (CUresult)version(told); }

// ---- properties: what code above divides and compares by ----

static int attribute(int wanted) {
    switch (wanted) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrTotalConstantMemory: case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrWarpSize: case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 52428800;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return capability() / 10;
    case cudaDevAttrComputeCapabilityMinor: return capability() % 10;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrConcurrentKernels: case cudaDevAttrCanMapHostMemory: case cudaDevAttrManagedMemory: return 1;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrHostRegisterSupported: case cudaDevAttrEccEnabled: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1;
    }
    return 0;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr wanted, int device) {
    *value = attribute((int)wanted);
    return cudaSuccess;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute wanted, CUdevice device) {
    *value = attribute((int)wanted); // the driver and the runtime number them alike
    return CUDA_SUCCESS;
}

// Headers before CUDA 13 rename it, and have another struct: they do for a process that sees no device.
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *told, int device) {
    memset(told, 0, sizeof *told);
    snprintf(told->name, sizeof told->name, "%s", device_name());
    told->uuid.bytes[15] = (char)(device + 1);
    told->pciBusID = device + 1;
    told->major = capability() / 10, told->minor = capability() % 10;
    told->totalGlobalMem = device_bytes();
    told->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    told->warpSize = attribute(cudaDevAttrWarpSize);
    told->maxThreadsPerBlock = told->maxThreadsDim[0] = told->maxThreadsDim[1] = 1024;
    told->maxThreadsDim[2] = 64;
    told->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    told->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
    told->maxGridSize[0] = 2147483647, told->maxGridSize[1] = told->maxGridSize[2] = 65535;
    told->sharedMemPerBlock = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerBlock);
    told->sharedMemPerBlockOptin = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    told->sharedMemPerMultiprocessor = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    told->totalConstMem = 65536;
    told->regsPerBlock = told->regsPerMultiprocessor = 65536;
    told->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
    told->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
    told->asyncEngineCount = 3, told->textureAlignment = 512, told->memPitch = 2147483647;
    told->unifiedAddressing = told->canMapHostMemory = told->concurrentKernels = told->managedMemory = 1;
    told->streamPrioritiesSupported = told->cooperativeLaunch = told->hostRegisterSupported = told->clusterLaunch = 1;
    return cudaSuccess;
}

// ---- the driver's own names, which Triton and torch's compiler use ----

CUresult cuInit(unsigned flags) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *n) {
    *n = device_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    snprintf(name, (size_t)room, "%s", device_name());
    return CUDA_SUCCESS;
}

// A context is the number of its device, plus one: NULL means none.
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(size_t)(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) { return cuDevicePrimaryCtxRetain(context, current); }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    *bytes = device_bytes();
    return CUDA_SUCCESS;
}

// ---- looking up functions by name ----

void *own_symbol(const char *name) {
    static void *library;
    Dl_info here;
    if (!library && dladdr((void *)own_symbol, &here)) library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    void *function = dlsym(library, name);
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    return function ? function : dlsym(library, newer);
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *status) {
    *function = own_symbol(name);
    if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

CUresult cuGetProcAddress(
    const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    *function = own_symbol(name);
    if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// ---- NVML, whose answers decide whether torch uses expandable segments ----

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "not simulated"; }

int nvmlDeviceGetCount_v2(unsigned *n) {
    *n = (unsigned)device_count();
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(size_t)(index + 1);
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) { return nvmlDeviceGetHandleByIndex_v2(0, handle); }

int nvmlDeviceGetUUID(void *handle, char *text, unsigned room) {
    snprintf(text, room, "GPU-00000000-0000-0000-0000-%012zu", (size_t)handle);
    return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *n, void *processes) {
    *n = 0;
    return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *told) { return version(told); }

int nvmlDeviceGetGpuFabricInfoV(void *handle, char *info) {
    memset(info + sizeof(unsigned), 0, 28); // after its version: no cluster, "not supported"
    return 0;
}
