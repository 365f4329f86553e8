/* States, timelines, and their exact integrals. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

#define MAX_STATES 256
#define NS 1e9

static const char *const quantity_names[QUANTITIES] = {
    "sm",          "occupancy", "tensor",   "hmma",        "dmma",     "imma",     "dfma",    "integer",
    "fp16",        "fp32",      "fp64",     "dram",        "graphics", "util",     "pcie_tx", "pcie_rx",
    "nvlink_tx",   "nvlink_rx", "power",    "sm_clock",    "memory_clock", "temperature", "used_mib", "throttle",
};

typedef struct {
    char name[64];
    vector value;
    int graphics_given, util_given;
} state;

static state states[MAX_STATES];
static int state_count;

int state_index(const char *name) {
    for (int i = 0; i < state_count; i++)
        if (!strcmp(states[i].name, name)) return i;
    return -1;
}

int state_add(const char *name) {
    int at = state_index(name);
    if (at >= 0 || state_count == MAX_STATES) return at;
    memset(&states[state_count], 0, sizeof(state));
    strncpy(states[state_count].name, name, sizeof(states[0].name) - 1);
    return state_count++;
}

int state_set(int at, const char *key, double value) {
    for (int i = 0; i < QUANTITIES; i++) {
        if (strcmp(quantity_names[i], key)) continue;
        states[at].value.of[i] = value;
        states[at].graphics_given |= i == GRAPHICS;
        states[at].util_given |= i == UTILIZATION;
        return 0;
    }
    return -1;
}

/* Fill in what follows from the rest; timelines are laid out afterwards. */
void states_finish(void) {
    for (int at = 0; at < state_count; at++) {
        double *of = states[at].value.of;
        if (!states[at].graphics_given) of[GRAPHICS] = of[SM] > 0;
        if (!states[at].util_given) of[UTILIZATION] = of[SM] > 0;
        for (int i = 0; i < SHARES_OF_SM; i++) of[CYCLES + i] = of[i] * of[SM_CLOCK] * 1e6;
    }
}

void states_clear(void) { state_count = 0; }

static void add(vector *to, const vector *what, double factor) {
    for (int i = 0; i < VECTOR; i++) to->of[i] += what->of[i] * factor;
}

static int64_t length_ns(const timeline *line) {
    return line->length ? line->segments[line->length - 1].end_ns : 0;
}

/* The integral over the whole timeline, or up to a moment inside it. */
static void inside(const timeline *line, int64_t at_ns, vector *out) {
    int low = 0, high = line->length - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (line->segments[middle].end_ns < at_ns) low = middle + 1;
        else high = middle;
    }
    const segment *found = &line->segments[low];
    int64_t begin = low ? line->segments[low - 1].end_ns : 0;
    *out = found->before;
    add(out, &states[found->state].value, (at_ns - begin) / NS);
}

void run(timeline *line, int state, int64_t duration_ns, long times) {
    for (; times > 0; times--) {
        if (line->length == line->room) {
            line->room = line->room ? 2 * line->room : 64;
            line->segments = realloc(line->segments, line->room * sizeof(segment));
        }
        segment *next = &line->segments[line->length];
        memset(next, 0, sizeof(*next));
        if (line->length) inside(line, length_ns(line), &next->before);
        next->state = state;
        next->end_ns = length_ns(line) + duration_ns;
        line->length++;
    }
}

void integral(const timeline *line, int64_t at_ns, vector *out) {
    int64_t whole = length_ns(line);
    const vector *idle = &states[line->idle].value;
    memset(out, 0, sizeof(*out));
    if (at_ns <= 0 || !line->length) {
        add(out, idle, at_ns / NS);
    } else if (at_ns < whole) {
        inside(line, at_ns, out);
    } else if (!line->repeats) {
        inside(line, whole, out);
        add(out, idle, (at_ns - whole) / NS);
    } else {
        vector once;
        inside(line, whole, &once);
        if (at_ns % whole) inside(line, at_ns % whole, out);
        add(out, &once, (double)(at_ns / whole));
    }
}

double momentary(const timeline *line, int64_t at_ns, enum quantity what) {
    int64_t whole = length_ns(line);
    if (line->length && line->repeats && at_ns >= whole) at_ns %= whole;
    if (!line->length || at_ns < 0 || at_ns >= whole) return states[line->idle].value.of[what];
    int low = 0, high = line->length - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (line->segments[middle].end_ns <= at_ns) low = middle + 1;
        else high = middle;
    }
    return states[line->segments[low].state].value.of[what];
}

double average(const timeline *line, int64_t begin_ns, int64_t end_ns, enum quantity what) {
    vector begin, end;
    integral(line, begin_ns, &begin);
    integral(line, end_ns, &end);
    return (end.of[what] - begin.of[what]) * NS / (end_ns - begin_ns);
}
