/* GPM: averages between two samples, exact to the script (but for the noise that it asks for). */
#include "standin.h"

#include <math.h>
#include <stdlib.h>

#define MAGIC 0x67706d21u
#define NS 1e9
#define MIB 1048576.0
#define DEVICE(handle)                                         \
    target *on = known(handle);                                \
    int entered = enter(__func__, on, NO_ITEM);                \
    if (entered != SUCCESS) return entered;                    \
    if (!on) return INVALID_ARGUMENT

typedef struct {
    unsigned magic;
    const target *of;
    int64_t at_ns;
    vector sum;
} sample;

static long alive;

EXPORT long standin_samples(void) { return __atomic_load_n(&alive, __ATOMIC_SEQ_CST); }

EXPORT int nvmlGpmQueryDeviceSupport(void *handle, gpm_support *out) {
    DEVICE(handle);
    if (out->version != 1) return VERSION_MISMATCH;
    out->supported = on->gpm;
    return SUCCESS;
}

EXPORT int nvmlGpmSampleAlloc(void **out) {
    int entered = enter(__func__, NULL, NO_ITEM);
    if (entered != SUCCESS) return entered;
    sample *new = calloc(1, sizeof(sample));
    if (!new) return UNKNOWN;
    new->magic = MAGIC;
    __atomic_add_fetch(&alive, 1, __ATOMIC_SEQ_CST);
    *out = new;
    return SUCCESS;
}

EXPORT int nvmlGpmSampleFree(void *freed) {
    int entered = enter(__func__, NULL, NO_ITEM);
    if (entered != SUCCESS) return entered;
    sample *old = freed;
    if (!old || old->magic != MAGIC) return INVALID_ARGUMENT;
    old->magic = 0;
    free(old);
    __atomic_sub_fetch(&alive, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

static int take(const target *on, sample *into) {
    if (!into || into->magic != MAGIC) return INVALID_ARGUMENT;
    if (!on->gpm) return NOT_SUPPORTED;
    int64_t at = now_ns();
    if (config.refresh_ns > 0) at -= ((at % config.refresh_ns) + config.refresh_ns) % config.refresh_ns;
    into->of = on;
    into->at_ns = at;
    integral(&on->line, at, &into->sum);
    return SUCCESS;
}

EXPORT int nvmlGpmSampleGet(void *handle, void *into) {
    DEVICE(handle);
    if (on->is_mig) return NOT_SUPPORTED;
    return take(on, into);
}

/* The instance is named by its number on the whole GPU. */
EXPORT int nvmlGpmMigSampleGet(void *handle, unsigned instance, void *into) {
    DEVICE(handle);
    if (on->is_mig) return INVALID_ARGUMENT;
    for (int i = 0; i < MAX_INSTANCES; i++) {
        target *part = &instances[on->index][i];
        if (!part->used || part->instance != (int)instance) continue;
        int code = item_code(__func__, part, instance);
        return code == SUCCESS ? take(part, into) : code;
    }
    return INVALID_ARGUMENT;
}

/* Repeatable noise, roughly normal: the mean of the script is left as it is. */
static double noise(void) {
    static uint64_t calls;
    double sum = 0;
    for (int i = 0; i < 12; i++) {
        uint64_t x = config.seed + __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) * 0x9e3779b97f4a7c15ULL;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
        sum += (double)((x ^ (x >> 31)) >> 11) / 9007199254740992.0;
    }
    return sum - 6;
}

/* Which quantity a metric is, and what one of its units is worth in ours; -1 if there is no such metric. */
static int percent_of(unsigned metric) {
    switch (metric) {
    case 1: return GRAPHICS;
    case 2: return SM;
    case 3: return OCCUPANCY;
    case 4: return INTEGER;
    case 5: return TENSOR;
    case 6: return DFMA;
    case 7: return HMMA;
    case 8: return DMMA;
    case 9: return IMMA;
    case 10: return DRAM;
    case 11: return FP64;
    case 12: return FP32;
    case 13: return FP16;
    default: return -1;
    }
}

static int rate_of(unsigned metric) {
    switch (metric) {
    case 20: return PCIE_TX;
    case 21: return PCIE_RX;
    case 60: return NVLINK_RX;
    case 61: return NVLINK_TX;
    default: return -1;
    }
}

static int cycles_of(unsigned metric) {
    switch (metric) {
    case 249: return SM;
    case 250: return TENSOR;
    case 251: return DMMA;
    case 252: return HMMA;
    case 253: return IMMA;
    case 254: return DFMA;
    case 257: return INTEGER;
    case 258: return FP64;
    case 259: return FP32;
    case 260: return FP16;
    default: return -1;
    }
}

static int read_metric(const sample *first, const sample *second, gpm_metric *out) {
    double span_s = (second->at_ns - first->at_ns) / NS;
    unsigned metric = out->metric;
    int what;
    if ((what = percent_of(metric)) >= 0 || (what = rate_of(metric)) >= 0) {
        if (span_s <= 0) return NO_DATA;
        double rate = (second->sum.of[what] - first->sum.of[what]) / span_s;
        if (rate_of(metric) >= 0) {
            out->value = rate / MIB;
            return SUCCESS;
        }
        if (config.noise > 0) rate = fmin(1, fmax(0, rate + config.noise * noise()));
        out->value = rate * 100;
        return SUCCESS;
    }
    /* Counters since the driver was loaded: the value at the second sample. */
    double sms = second->of->sms;
    if (metric == 248) out->value = second->sum.of[SM_CLOCK] * 1e6 * sms;
    else if (metric == 255) out->value = second->sum.of[PCIE_TX];
    else if (metric == 256) out->value = second->sum.of[PCIE_RX];
    else if ((what = cycles_of(metric)) >= 0) out->value = second->sum.of[CYCLES + what] * sms;
    else return NOT_SUPPORTED;
    return SUCCESS;
}

EXPORT int nvmlGpmMetricsGet(gpm_metrics *wanted) {
    const sample *first = wanted->first, *second = wanted->second;
    if (wanted->version != 1) return VERSION_MISMATCH;
    if (!first || !second || first->magic != MAGIC || second->magic != MAGIC) return INVALID_ARGUMENT;
    int entered = enter(__func__, second->of, NO_ITEM);
    if (entered != SUCCESS) return entered;
    if (!second->of || first->of != second->of) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < wanted->count; i++) {
        gpm_metric *metric = &wanted->metrics[i];
        metric->short_name = metric->long_name = metric->unit = NULL;
        metric->status = item_code(__func__, second->of, metric->metric);
        if (metric->status == SUCCESS) metric->status = read_metric(first, second, metric);
        if (metric->status == SUCCESS)
            metric->value = scripted(__func__, second->of, metric->metric, metric->value);
    }
    return SUCCESS;
}

/* For the test that compares this ABI with nvidia-ml-py's. */
EXPORT long standin_size(int of) {
    const long sizes[] = {sizeof(pci_info),       sizeof(memory_info),       sizeof(memory_info_v2),
                          sizeof(utilization_rates), sizeof(temperature_v1), sizeof(device_attributes),
                          sizeof(field_value),    sizeof(gpm_metric),        sizeof(gpm_metrics),
                          sizeof(gpm_support)};
    return of >= 0 && of < (int)(sizeof(sizes) / sizeof(*sizes)) ? sizes[of] : -1;
}
