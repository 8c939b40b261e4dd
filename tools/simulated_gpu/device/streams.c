// Streams and events. The device is done with everything at once, so a wait only has to be counted.
#include "device.h"
#include <stdlib.h>
#include <time.h>

typedef struct {
    int priority;
} Stream;
typedef struct {
    double at; // milliseconds, when it was last recorded
} Event;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static cudaError_t new_stream(cudaStream_t *made, int priority) {
    Stream *stream = malloc(sizeof *stream);
    stream->priority = priority;
    *made = (cudaStream_t)stream;
    count("call", "cudaStreamCreate", 0);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *made) { return new_stream(made, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return new_stream(made, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int p) { return new_stream(made, p); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    bool of_the_runtime = stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    *priority = of_the_runtime ? 0 : ((Stream *)stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (!nothing_to_wait_for()) host_waits("cudaStreamSynchronize"); // torch asks after a copy that has waited, too
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    host_waits("cudaDeviceSynchronize");
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    count("call", "cudaStreamWaitEvent", 0);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

// ---- events ----

cudaError_t cudaEventCreate(cudaEvent_t *made) {
    *made = calloc(1, sizeof(Event));
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { return cudaEventCreate(made); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ((Event *)event)->at = now();
    count("call", "cudaEventRecord", 0);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned flags) {
    return cudaEventRecord(event, s);
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaSuccess; }

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    host_waits("cudaEventSynchronize");
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    double passed = ((Event *)to)->at - ((Event *)from)->at;
    *ms = passed > 1e-3 ? (float)passed : 1e-3f; // the host divides by it
    return cudaSuccess;
}

// ---- nothing is captured into graphs ----

#undef cudaStreamGetCaptureInfo // headers before CUDA 13 give the name to an older form

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
    if (status) *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
