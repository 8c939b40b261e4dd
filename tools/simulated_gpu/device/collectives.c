// NCCL: this process is one rank of as many as it says. Nothing travels, so no other rank has to exist; what would
// travel is counted by collective, size of the group, and bytes.
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int ranks, rank;
} Group;
typedef struct {
    char bytes[128];
} GroupId;

static int new_group(void **made, int ranks, int rank) {
    Group *group = calloc(1, 4096); // torch reads its fields for reports
    group->ranks = ranks, group->rank = rank;
    *made = group;
    count("call", "ncclCommInit", 0);
    return 0;
}

int ncclGetVersion(int *version) {
    *version = 22907;
    return 0;
}

int ncclGetUniqueId(GroupId *id) {
    memset(id, 1, sizeof *id);
    return 0;
}

const char *ncclGetErrorString(int error) { return "not simulated"; }
const char *ncclGetLastError(void *group) { return ""; }

int ncclCommInitRank(void **made, int ranks, GroupId id, int rank) { return new_group(made, ranks, rank); }
int ncclCommInitRankConfig(void **made, int n, GroupId id, int rank, void *c) { return new_group(made, n, rank); }
int ncclCommInitRankScalable(void **made, int ranks, int rank, int n, GroupId *ids, void *config) {
    return new_group(made, ranks, rank);
}

int ncclCommCount(const void *group, int *ranks) {
    *ranks = ((const Group *)group)->ranks;
    return 0;
}

int ncclCommUserRank(const void *group, int *rank) {
    *rank = ((const Group *)group)->rank;
    return 0;
}

int ncclCommGetAsyncError(void *group, int *error) {
    *error = 0;
    return 0;
}

int ncclCommFinalize(void *group) { return 0; }
int ncclCommAbort(void *group) { return 0; }
int ncclCommDestroy(void *group) { return 0; }
int ncclCommRegister(void *group, void *memory, size_t size, void **handle) {
    *handle = NULL;
    return 0;
}
int ncclCommDeregister(void *group, void *handle) { return 0; }
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
int ncclRedOpCreatePreMulSum(int *op, void *factor, int type, int where, void *group) {
    *op = 10; // after the built-in ones
    return 0;
}
int ncclRedOpDestroy(int op, void *group) { return 0; }

static size_t width(int type) { // in NCCL's order: int8, uint8, int32, uint32, int64, uint64, half, float, double, bfloat16
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return type >= 0 && type < 10 ? widths[type] : 1;
}

// n: elements. each: whether a rank has as many for every rank of the group.
static int travels(const char *what, const void *group, size_t n, bool each, int type) {
    int ranks = ((const Group *)group)->ranks;
    char name[64];
    snprintf(name, sizeof name, "%s of %d", what, ranks);
    count("collective", name, n * width(type) * (each ? (size_t)ranks : 1));
    return 0;
}

int ncclAllReduce(const void *in, void *out, size_t n, int type, int op, void *group, void *stream) {
    return travels("all-reduce", group, n, false, type);
}
int ncclReduce(const void *in, void *out, size_t n, int type, int op, int root, void *group, void *stream) {
    return travels("reduce", group, n, false, type);
}
int ncclBroadcast(const void *in, void *out, size_t n, int type, int root, void *group, void *stream) {
    return travels("broadcast", group, n, false, type);
}
int ncclBcast(void *both, size_t n, int type, int root, void *group, void *stream) {
    return travels("broadcast", group, n, false, type);
}
int ncclAllGather(const void *in, void *out, size_t n, int type, void *group, void *stream) {
    return travels("all-gather", group, n, true, type);
}
int ncclReduceScatter(const void *in, void *out, size_t n, int type, int op, void *group, void *stream) {
    return travels("reduce-scatter", group, n, true, type);
}
int ncclAlltoAll(const void *in, void *out, size_t n, int type, void *group, void *stream) {
    return travels("all-to-all", group, n, true, type);
}
int ncclSend(const void *in, size_t n, int type, int to, void *group, void *stream) {
    return travels("send", group, n, false, type);
}
int ncclRecv(void *out, size_t n, int type, int from, void *group, void *stream) {
    return travels("receive", group, n, false, type);
}
