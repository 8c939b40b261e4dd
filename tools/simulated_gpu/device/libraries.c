// cuBLAS, cuBLASLt and cuDNN: products and fused attention compute nothing and are counted; all else says yes. NVRTC
// compiles to nothing, and CUPTI sees no kernel.
// Their headers are in no small wheel, so functions take what the caller passes and read only what they must.
#include "device.h"
#include <stdlib.h>
#include <string.h>

static int new_handle(void **handle) {
    *handle = calloc(1, 256); // larger than any of them
    return 0;
}

#define MADE(name) int name(void **handle) { return new_handle(handle); }
#define FREED(name) int name(void *handle) { free(handle); return 0; }
#define AGREED(name) int name() { return 0; }
#define ZERO(name) int name(void *handle, int *value) { *value = 0; return 0; }
#define PRODUCT(name) int name() { count("product", #name, 0); return 0; }

MADE(cublasCreate_v2) FREED(cublasDestroy_v2)
AGREED(cublasSetStream_v2) AGREED(cublasSetWorkspace_v2) AGREED(cublasSetMathMode) AGREED(cublasSetPointerMode_v2)
AGREED(cublasSetSmCountTarget) ZERO(cublasGetMathMode) ZERO(cublasGetPointerMode_v2)

PRODUCT(cublasGemmEx) PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasDgemmStridedBatched) PRODUCT(cublasSgemmStridedBatchedEx)
PRODUCT(cublasSgemv_v2) PRODUCT(cublasDgemv_v2) PRODUCT(cublasSdot_v2) PRODUCT(cublasDdot_v2) PRODUCT(cublasDotEx)
PRODUCT(cublasLtMatmul)

MADE(cublasLtCreate) FREED(cublasLtDestroy)
MADE(cublasLtMatmulDescCreate) FREED(cublasLtMatmulDescDestroy) AGREED(cublasLtMatmulDescSetAttribute)
MADE(cublasLtMatmulPreferenceCreate) FREED(cublasLtMatmulPreferenceDestroy)
AGREED(cublasLtMatmulPreferenceSetAttribute)
MADE(cublasLtMatrixLayoutCreate) FREED(cublasLtMatrixLayoutDestroy) AGREED(cublasLtMatrixLayoutSetAttribute)

int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int wanted, void *results,
    int *n) {
    *n = 1; // the caller's own zeros: the first algorithm, without a workspace
    return 0;
}

size_t cublasLtGetVersion(void) { return 130000; }

// ---- cuDNN's graphs, of which torch makes attention ----

size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }

MADE(cudnnCreate) FREED(cudnnDestroy) AGREED(cudnnSetStream)

int cudnnGetStream(void *handle, void **stream) {
    *stream = NULL;
    return 0;
}

int cudnnBackendCreateDescriptor(int type, void **descriptor) { return new_handle(descriptor); }
FREED(cudnnBackendDestroyDescriptor) AGREED(cudnnBackendSetAttribute) AGREED(cudnnBackendFinalize)

enum { OF_BOOLEAN = 2, OF_INT64 = 3, OF_DESCRIPTOR = 15 };

int cudnnBackendGetAttribute(void *descriptor, int name, int type, long room, long *n, void *values) {
    if (n) *n = 1;
    // A workspace has 0 bytes. Descriptors are the caller's own, and stay as they are.
    if (values && room > 0 && type != OF_DESCRIPTOR) memset(values, 0, type == OF_BOOLEAN ? 1 : type == OF_INT64 ? 8 : 4);
    return 0;
}

int cudnnBackendExecute(void *handle, void *plan, void *values) {
    count("kernel", "cuDNN graph", 0);
    return 0;
}

// ---- NVRTC, by which torch compiles some kernels when it first runs them: a kernel is its name, see kernels.c ----

MADE(nvrtcCreateProgram)
AGREED(nvrtcAddNameExpression) AGREED(nvrtcCompileProgram) AGREED(nvrtcGetCUBIN) AGREED(nvrtcGetPTX)

int nvrtcDestroyProgram(void **program) {
    free(*program);
    return 0;
}

int nvrtcVersion(int *major, int *minor) {
    *major = CUDART_VERSION / 1000, *minor = CUDART_VERSION % 1000 / 10;
    return 0;
}

int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) {
    *lowered = name;
    return 0;
}

static int no_bytes(size_t *size) {
    *size = 0;
    return 0;
}
int nvrtcGetCUBINSize(void *program, size_t *size) { return no_bytes(size); }
int nvrtcGetPTXSize(void *program, size_t *size) { return no_bytes(size); }

// ---- CUPTI, which torch's profiler asks for what ran on the device ----

MADE(cuptiSubscribe)
AGREED(cuptiUnsubscribe) AGREED(cuptiFinalize) AGREED(cuptiEnableCallback) AGREED(cuptiEnableDomain)
AGREED(cuptiActivityEnable) AGREED(cuptiActivityDisable) AGREED(cuptiActivityRegisterCallbacks)
AGREED(cuptiActivityRegisterTimestampCallback) AGREED(cuptiActivitySetAttribute) AGREED(cuptiActivityFlushAll)
AGREED(cuptiActivityEnableRuntimeApi) AGREED(cuptiActivityEnableDriverApi)
AGREED(cuptiActivityEnableCudaEventDeviceTimestamps)
AGREED(cuptiActivityPushExternalCorrelationId) AGREED(cuptiActivityPopExternalCorrelationId)

int cuptiGetVersion(unsigned *version) {
    *version = CUDART_VERSION;
    return 0;
}
