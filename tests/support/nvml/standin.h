/* A stand-in for NVIDIA's management library: what its parts share. See nvml_standin.py for what it is for and how it
 * is scripted. The declarations of NVML's ABI below are only those that it needs; a test compares their sizes with
 * nvidia-ml-py's. */
#ifndef STANDIN_H
#define STANDIN_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    GPU_IS_LOST = 15,
    NO_DATA = 21,
    VERSION_MISMATCH = 25,
    UNKNOWN = 999
};

/* What a state of the script gives. The order is that of `quantity_names`. */
enum quantity {
    SM,
    OCCUPANCY,
    TENSOR,
    HMMA,
    DMMA,
    IMMA,
    DFMA,
    INTEGER,
    FP16,
    FP32,
    FP64,
    SHARES_OF_SM, /* the quantities above are counted in SM cycles */
    DRAM = SHARES_OF_SM,
    GRAPHICS,
    UTILIZATION,
    PCIE_TX,
    PCIE_RX,
    NVLINK_TX,
    NVLINK_RX,
    POWER,
    SM_CLOCK,
    MEMORY_CLOCK,
    TEMPERATURE,
    USED_MIB,
    THROTTLE,
    QUANTITIES,
    /* Derived: each of the first quantities times the SM clock, a cycle being one of an SM. */
    CYCLES = QUANTITIES,
    VECTOR = QUANTITIES + SHARES_OF_SM
};

typedef struct {
    double of[VECTOR];
} vector;

typedef struct {
    int64_t end_ns; /* since the begin of the timeline */
    int state;
    vector before; /* integral up to its begin, in units times seconds */
} segment;

typedef struct {
    segment *segments;
    int length, room;
    int repeats;
    int idle; /* the state outside of it */
} timeline;

/* A GPU, or one MIG instance of it: what a handle points to. */
typedef struct target {
    int used, index, instance, compute, is_mig;
    struct target *parent;
    char name[96], uuid[96];
    unsigned domain, bus, slot, sms, mig_mode, major, minor, nvlinks, ecc, gpm;
    double memory_mib, reserved_mib, max_sm_clock, max_memory_clock, power_limit;
    timeline line;
} target;

#define MAX_DEVICES 8
#define MAX_INSTANCES 8
extern target devices[MAX_DEVICES];
extern target instances[MAX_DEVICES][MAX_INSTANCES];
extern int device_count;

typedef struct {
    char driver[64], library[64];
    int cuda;
    double noise;
    uint64_t seed;
    int64_t refresh_ns, energy_period_ns, power_window_ns;
} settings;
extern settings config;

/* script.c: the script, its clock and its faults. Items: metric, field, clock, counter, link; NO_ITEM if none. */
#define NO_ITEM (-1L)
int64_t now_ns(void);
int opens(void);
int closes(void);
/* What a call returns before it does anything; sleeps where the script says so. */
int enter(const char *function, const target *on, long item);
/* The same for one item of a call that asks for many. */
int item_code(const char *function, const target *on, long item);
/* The value that the script puts in place of `value`. */
double scripted(const char *function, const target *on, long item, double value);
target *known(void *handle);

/* timeline.c */
int state_index(const char *name);
int state_add(const char *name);
int state_set(int state, const char *key, double value);
void states_finish(void);
void states_clear(void);
void run(timeline *line, int state, int64_t duration_ns, long times);
void integral(const timeline *line, int64_t at_ns, vector *out);
double momentary(const timeline *line, int64_t at_ns, enum quantity what);
double average(const timeline *line, int64_t begin_ns, int64_t end_ns, enum quantity what);

/* values.c */
unsigned whole32(double value);
unsigned long long whole64(double value);

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} pci_info;

typedef struct {
    unsigned long long total, free, used;
} memory_info;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_info_v2;

typedef struct {
    unsigned gpu, memory;
} utilization_rates;

typedef struct {
    unsigned version;
    int sensor, temperature;
} temperature_v1;

typedef struct {
    unsigned multiprocessors, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mb;
} device_attributes;

typedef struct {
    unsigned field, scope;
    int64_t timestamp_us, latency_us;
    int type, status;
    union {
        double real;
        unsigned word;
        unsigned long long_word;
        unsigned long long wide;
    } value;
} field_value;

typedef struct {
    unsigned metric;
    int status;
    double value;
    char *short_name, *long_name, *unit;
} gpm_metric;

typedef struct {
    unsigned version, count;
    void *first, *second;
    gpm_metric metrics[]; /* as many as the caller's header has */
} gpm_metrics;

typedef struct {
    unsigned version, supported;
} gpm_support;

#endif
