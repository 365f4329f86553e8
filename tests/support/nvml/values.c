/* What devices are and what they show now. */
#include "standin.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define ENTER(on, item)                                        \
    do {                                                       \
        int entered = enter(__func__, on, item);               \
        if (entered != SUCCESS) return entered;                \
    } while (0)
#define DEVICE(handle, item)                                   \
    target *on = known(handle);                                \
    ENTER(on, item);                                           \
    if (!on) return INVALID_ARGUMENT
/* What the driver does not give for a MIG instance. */
#define WHOLE(handle, item)                                    \
    DEVICE(handle, item);                                      \
    if (on->is_mig) return NOT_SUPPORTED
#define SHOW(item, value) scripted(__func__, on, item, value)

enum {
    FIELD_MEMORY_TEMPERATURE = 82,
    FIELD_ENERGY = 83,
    FIELD_LINKS = 91,
    FIELD_NVLINK_TX = 138,
    FIELD_NVLINK_RX = 139,
    FIELD_POWER_AVERAGE = 185,
    FIELD_POWER = 186,
    FIELD_PCIE_TX = 197,
    FIELD_PCIE_RX = 198
};
enum { WORD = 1, WIDE = 3 };

unsigned whole32(double value) { return value < 0 ? 0 : value >= 4294967295.0 ? 4294967295u : (unsigned)(value + 0.5); }

unsigned long long whole64(double value) {
    return value < 0 ? 0 : value >= 18446744073709551615.0 ? ~0ULL : (unsigned long long)(value + 0.5);
}

static int text(char *to, unsigned room, const char *from) {
    if (strlen(from) + 1 > room) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

/* The library and the machine */

EXPORT int nvmlInitWithFlags(unsigned flags) { return flags ? INVALID_ARGUMENT : opens(); }
EXPORT int nvmlInit_v2(void) { return opens(); }
EXPORT int nvmlShutdown(void) { return closes(); }

EXPORT const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "The operation was successful";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case 10: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    case NO_DATA: return "No data";
    default: return "Unknown Error";
    }
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER(NULL, NO_ITEM);
    return text(version, length, config.driver);
}

EXPORT int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    ENTER(NULL, NO_ITEM);
    return text(version, length, config.library);
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version) {
    ENTER(NULL, NO_ITEM);
    *version = config.cuda;
    return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER(NULL, NO_ITEM);
    *version = config.cuda;
    return SUCCESS;
}

/* Finding devices */

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER(NULL, NO_ITEM);
    *count = device_count;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    ENTER(index < (unsigned)device_count ? &devices[index] : NULL, index);
    if (index >= (unsigned)device_count) return INVALID_ARGUMENT;
    *handle = &devices[index];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    target *found = NULL;
    for (int i = 0; i < device_count; i++) {
        if (!strcmp(devices[i].uuid, uuid)) found = &devices[i];
        for (int j = 0; j < MAX_INSTANCES; j++)
            if (instances[i][j].used && !strcmp(instances[i][j].uuid, uuid)) found = &instances[i][j];
    }
    ENTER(found, NO_ITEM);
    if (!found) return NOT_FOUND;
    *handle = found;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **handle) {
    unsigned domain = 0, bus = 0, slot = 0;
    if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        domain = 0;
        if (sscanf(bus_id, "%x:%x", &bus, &slot) != 2) return INVALID_ARGUMENT;
    }
    target *found = NULL;
    for (int i = 0; i < device_count; i++)
        if (devices[i].domain == domain && devices[i].bus == bus && devices[i].slot == slot) found = &devices[i];
    ENTER(found, NO_ITEM);
    if (!found) return NOT_FOUND;
    *handle = found;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    WHOLE(handle, NO_ITEM);
    *index = on->index;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) {
    WHOLE(handle, NO_ITEM);
    *minor = on->index;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    DEVICE(handle, NO_ITEM);
    return text(name, length, on->name);
}

EXPORT int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    DEVICE(handle, NO_ITEM);
    return text(uuid, length, on->uuid);
}

EXPORT int nvmlDeviceGetPciInfo_v3(void *handle, pci_info *info) {
    WHOLE(handle, NO_ITEM);
    memset(info, 0, sizeof(*info));
    info->domain = on->domain, info->bus = on->bus, info->device = on->slot;
    snprintf(info->busId, sizeof(info->busId), "%08X:%02X:%02X.0", on->domain, on->bus, on->slot);
    snprintf(info->busIdLegacy, sizeof(info->busIdLegacy), "%04X:%02X:%02X.0", on->domain & 0xffff, on->bus & 0xff,
             on->slot & 0xff);
    return SUCCESS;
}

/* MIG */

EXPORT int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is_mig) {
    DEVICE(handle, NO_ITEM);
    *is_mig = on->is_mig;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    WHOLE(handle, NO_ITEM);
    *current = *pending = on->mig_mode;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    WHOLE(handle, NO_ITEM);
    *count = on->mig_mode ? MAX_INSTANCES : 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **out) {
    WHOLE(handle, index);
    if (index >= MAX_INSTANCES) return INVALID_ARGUMENT;
    if (!instances[on->index][index].used) return NOT_FOUND;
    *out = &instances[on->index][index];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *handle, void **out) {
    DEVICE(handle, NO_ITEM);
    if (!on->is_mig) return INVALID_ARGUMENT;
    *out = on->parent;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id) {
    DEVICE(handle, NO_ITEM);
    if (!on->is_mig) return INVALID_ARGUMENT;
    *id = on->instance;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *id) {
    DEVICE(handle, NO_ITEM);
    if (!on->is_mig) return INVALID_ARGUMENT;
    *id = on->compute;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetAttributes_v2(void *handle, device_attributes *out) {
    DEVICE(handle, NO_ITEM);
    if (!on->is_mig) return NOT_SUPPORTED;
    memset(out, 0, sizeof(*out));
    out->multiprocessors = on->sms;
    out->gpu_slices = out->compute_slices = 1;
    out->memory_mb = on->memory_mib;
    return SUCCESS;
}

/* What a device is */

EXPORT int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    DEVICE(handle, NO_ITEM);
    *major = on->major, *minor = on->minor;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetEccMode(void *handle, unsigned *current, unsigned *pending) {
    WHOLE(handle, NO_ITEM);
    *current = *pending = on->ecc;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPersistenceMode(void *handle, unsigned *mode) {
    WHOLE(handle, NO_ITEM);
    *mode = whole32(SHOW(NO_ITEM, 1));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxClockInfo(void *handle, unsigned clock, unsigned *mhz) {
    WHOLE(handle, clock);
    *mhz = whole32(SHOW(clock, clock == 2 ? on->max_memory_clock : on->max_sm_clock));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetApplicationsClock(void *handle, unsigned clock, unsigned *mhz) {
    WHOLE(handle, clock);
    *mhz = whole32(SHOW(clock, clock == 2 ? on->max_memory_clock : on->max_sm_clock));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) {
    WHOLE(handle, NO_ITEM);
    *milliwatts = whole32(SHOW(NO_ITEM, on->power_limit * 1e3));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *processes) {
    DEVICE(handle, NO_ITEM);
    (void)processes;
    *count = 0;
    return SUCCESS;
}

/* What it shows now */

static double moment(const target *on, enum quantity what) { return momentary(&on->line, now_ns(), what); }

static double total(const target *on, enum quantity what, int64_t period_ns) {
    int64_t at = now_ns();
    vector sum;
    if (period_ns > 0) at -= ((at % period_ns) + period_ns) % period_ns;
    integral(&on->line, at, &sum);
    return sum.of[what];
}

static double recent(const target *on, enum quantity what, int64_t window_ns) {
    int64_t at = now_ns();
    return average(&on->line, at - window_ns, at, what);
}

EXPORT int nvmlDeviceGetClockInfo(void *handle, unsigned clock, unsigned *mhz) {
    WHOLE(handle, clock);
    if (clock > 3) return INVALID_ARGUMENT;
    *mhz = whole32(SHOW(clock, moment(on, clock == 2 ? MEMORY_CLOCK : SM_CLOCK)));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    WHOLE(handle, NO_ITEM);
    *milliwatts = whole32(SHOW(NO_ITEM, recent(on, POWER, config.power_window_ns) * 1e3));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    WHOLE(handle, NO_ITEM);
    *millijoules = whole64(SHOW(NO_ITEM, total(on, POWER, config.energy_period_ns) * 1e3));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius) {
    WHOLE(handle, sensor);
    *celsius = whole32(SHOW(sensor, moment(on, TEMPERATURE)));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperatureV(void *handle, temperature_v1 *out) {
    WHOLE(handle, out->sensor);
    if ((out->version & 0xffffff) != sizeof(*out)) return VERSION_MISMATCH;
    out->temperature = SHOW(out->sensor, moment(on, TEMPERATURE));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *bits) {
    WHOLE(handle, NO_ITEM);
    *bits = whole64(SHOW(NO_ITEM, moment(on, THROTTLE)));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *bits) {
    WHOLE(handle, NO_ITEM);
    *bits = whole64(SHOW(NO_ITEM, moment(on, THROTTLE)));
    return SUCCESS;
}

EXPORT int nvmlDeviceGetUtilizationRates(void *handle, utilization_rates *out) {
    WHOLE(handle, NO_ITEM);
    out->gpu = whole32(SHOW(NO_ITEM, moment(on, UTILIZATION) * 100));
    out->memory = whole32(moment(on, DRAM) * 100);
    return SUCCESS;
}

#define MIB 1048576.0

EXPORT int nvmlDeviceGetMemoryInfo(void *handle, memory_info *out) {
    DEVICE(handle, NO_ITEM);
    out->total = whole64(on->memory_mib * MIB);
    out->used = whole64(SHOW(NO_ITEM, (moment(on, USED_MIB) + on->reserved_mib) * MIB));
    out->free = out->total - out->used;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_info_v2 *out) {
    DEVICE(handle, NO_ITEM);
    if ((out->version & 0xffffff) != sizeof(*out)) return VERSION_MISMATCH;
    out->total = whole64(on->memory_mib * MIB);
    out->reserved = whole64(on->reserved_mib * MIB);
    out->used = whole64(SHOW(NO_ITEM, moment(on, USED_MIB) * MIB));
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPcieThroughput(void *handle, unsigned counter, unsigned *kb_per_s) {
    WHOLE(handle, counter);
    if (counter > 1) return INVALID_ARGUMENT;
    *kb_per_s = whole32(SHOW(counter, recent(on, counter ? PCIE_RX : PCIE_TX, 20000000) / 1e3));
    return SUCCESS;
}

static int field(const target *on, field_value *out) {
    const char *function = "nvmlDeviceGetFieldValues";
    double value;
    out->type = WIDE;
    switch (out->field) {
    case FIELD_MEMORY_TEMPERATURE: value = moment(on, TEMPERATURE), out->type = WORD; break;
    case FIELD_LINKS: value = on->nvlinks, out->type = WORD; break;
    case FIELD_POWER: value = moment(on, POWER) * 1e3, out->type = WORD; break;
    case FIELD_POWER_AVERAGE: value = recent(on, POWER, config.power_window_ns) * 1e3, out->type = WORD; break;
    case FIELD_ENERGY: value = total(on, POWER, config.energy_period_ns) * 1e3; break;
    case FIELD_NVLINK_TX: value = total(on, NVLINK_TX, 0) / 1024; break;
    case FIELD_NVLINK_RX: value = total(on, NVLINK_RX, 0) / 1024; break;
    case FIELD_PCIE_TX: value = total(on, PCIE_TX, 0); break;
    case FIELD_PCIE_RX: value = total(on, PCIE_RX, 0); break;
    default: return NOT_SUPPORTED;
    }
    if ((out->field == FIELD_NVLINK_TX || out->field == FIELD_NVLINK_RX) && !on->nvlinks) return NOT_SUPPORTED;
    value = scripted(function, on, out->field, value);
    if (out->type == WORD) out->value.word = whole32(value);
    else out->value.wide = whole64(value);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetFieldValues(void *handle, int count, field_value *values) {
    WHOLE(handle, NO_ITEM);
    for (int i = 0; i < count; i++) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        values[i].timestamp_us = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
        values[i].latency_us = 0;
        values[i].status = item_code(__func__, on, values[i].field);
        if (values[i].status == SUCCESS) values[i].status = field(on, &values[i]);
    }
    return SUCCESS;
}
