/* The script: devices, timelines, faults, and the clock. */
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MAX_RULES 256
#define MAX_WORDS 64
#define ANY (-2L)

enum kind { FAULT, VALUE, SLEEP };

typedef struct {
    enum kind kind;
    char function[64];
    long device, instance, item, from, count, seen;
    int64_t after_ns, until_ns, sleep_ns;
    int code;
    double value;
    char held[512]; /* it sleeps as long as there is such a file */
} rule;

target devices[MAX_DEVICES];
target instances[MAX_DEVICES][MAX_INSTANCES];
int device_count;
settings config;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static rule rules[MAX_RULES];
static int rule_count;
static char loaded[4096], log_path[4096];
static long references;
static pid_t owner;
static enum { REAL, SET, SHARED } clock_kind;
static int64_t origin_ns, set_ns;
static const volatile int64_t *shared_ns;

/* The clock */

EXPORT int64_t standin_clock_ns(void) {
    if (clock_kind == SET) return __atomic_load_n(&set_ns, __ATOMIC_SEQ_CST);
    if (clock_kind == SHARED) return *shared_ns;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

EXPORT void standin_set_time_ns(int64_t to_ns) { __atomic_store_n(&set_ns, to_ns, __ATOMIC_SEQ_CST); }

EXPORT int64_t standin_origin_ns(void) { return origin_ns; }

int64_t now_ns(void) { return standin_clock_ns() - origin_ns; }

typedef struct {
    int64_t duration_ns;
    char held[512];
} pause_of;

static void rest(const pause_of *wanted) {
    struct timespec left = {wanted->duration_ns / 1000000000LL, wanted->duration_ns % 1000000000LL};
    while (wanted->duration_ns && nanosleep(&left, &left) && errno == EINTR) continue;
    while (wanted->held[0] && !access(wanted->held, F_OK)) {
        struct timespec moment = {0, 2000000};
        nanosleep(&moment, NULL);
    }
}

/* Reading the script */

static int words(char *line, char **out) {
    int count = 0;
    while (count < MAX_WORDS) {
        while (*line == ' ' || *line == '\t') line++;
        if (!*line || *line == '#') break;
        out[count++] = line;
        int quoted = 0;
        char *to = line;
        for (; *line && (quoted || (*line != ' ' && *line != '\t')); line++) {
            if (*line == '"') quoted = !quoted;
            else *to++ = *line;
        }
        if (*line) line++;
        *to = 0;
    }
    return count;
}

static int64_t duration(const char *text) {
    char *unit;
    double number = strtod(text, &unit);
    double factor = !strcmp(unit, "s") ? 1e9 : !strcmp(unit, "ms") ? 1e6 : !strcmp(unit, "us") ? 1e3 : 1;
    return (int64_t)(number * factor + 0.5);
}

static void copy(char *to, size_t room, const char *from) {
    strncpy(to, from, room - 1);
    to[room - 1] = 0;
}

/* Splits key=value in place; NULL if it is not of that form. */
static char *value_of(char *word) {
    char *at = strchr(word, '=');
    if (at) *at++ = 0;
    return at;
}

static target *place(const char *text) {
    char *rest_of;
    long index = strtol(text, &rest_of, 10);
    if (rest_of == text || index < 0 || index >= MAX_DEVICES) return NULL;
    if (*rest_of != ':') return &devices[index];
    long instance = strtol(rest_of + 1, NULL, 10);
    for (int i = 0; i < MAX_INSTANCES; i++)
        if (instances[index][i].used && instances[index][i].instance == instance) return &instances[index][i];
    return NULL;
}

static int set_pci(target *on, const char *text) {
    on->domain = 0;
    if (sscanf(text, "%x:%x:%x", &on->domain, &on->bus, &on->slot) == 3) return 0;
    on->domain = 0;
    return sscanf(text, "%x:%x", &on->bus, &on->slot) == 2 ? 0 : -1;
}

static int set_target(target *on, char **word, int count) {
    for (int i = 0; i < count; i++) {
        char *value = value_of(word[i]);
        if (!value) return -1;
        const char *key = word[i];
        double number = strtod(value, NULL);
        if (!strcmp(key, "name")) copy(on->name, sizeof(on->name), value);
        else if (!strcmp(key, "uuid")) copy(on->uuid, sizeof(on->uuid), value);
        else if (!strcmp(key, "pci")) { if (set_pci(on, value)) return -1; }
        else if (!strcmp(key, "capability")) sscanf(value, "%u.%u", &on->major, &on->minor);
        else if (!strcmp(key, "memory_mib")) on->memory_mib = number;
        else if (!strcmp(key, "reserved_mib")) on->reserved_mib = number;
        else if (!strcmp(key, "sms")) on->sms = number;
        else if (!strcmp(key, "gpm")) on->gpm = number;
        else if (!strcmp(key, "ecc")) on->ecc = number;
        else if (!strcmp(key, "mig")) on->mig_mode = number;
        else if (!strcmp(key, "nvlinks")) on->nvlinks = number;
        else if (!strcmp(key, "power_limit")) on->power_limit = number;
        else if (!strcmp(key, "max_sm_clock")) on->max_sm_clock = number;
        else if (!strcmp(key, "max_memory_clock")) on->max_memory_clock = number;
        else if (!strcmp(key, "gi")) on->instance = number;
        else if (!strcmp(key, "ci")) on->compute = number;
        else return -1;
    }
    return 0;
}

static int read_device(char **word, int count) {
    long index = strtol(word[1], NULL, 10);
    if (index != device_count || index >= MAX_DEVICES) return -1;
    target *on = &devices[device_count++];
    *on = (target){.used = 1, .index = index, .instance = -1, .compute = -1, .bus = 0x10 + index, .major = 9};
    on->sms = 132, on->gpm = 1, on->ecc = 1, on->nvlinks = 18, on->memory_mib = 81559, on->reserved_mib = 600;
    on->max_sm_clock = 1980, on->max_memory_clock = 2619, on->power_limit = 700;
    copy(on->name, sizeof(on->name), "NVIDIA H100 80GB HBM3");
    snprintf(on->uuid, sizeof(on->uuid), "GPU-%08lx-0000-0000-0000-000000000000", index);
    return set_target(on, word + 2, count - 2);
}

static int read_instance(char **word, int count) {
    target *parent = place(word[1]);
    if (!parent || !parent->used) return -1;
    for (int i = 0; i < MAX_INSTANCES; i++) {
        target *on = &instances[parent->index][i];
        if (on->used) continue;
        *on = *parent;
        on->line = (timeline){0};
        on->parent = parent, on->is_mig = 1, on->instance = i + 1, on->compute = 0, on->mig_mode = 0;
        on->sms = 16, on->memory_mib = 9984, on->nvlinks = 0;
        snprintf(on->name, sizeof(on->name), "%.70s MIG 1g.10gb", parent->name);
        snprintf(on->uuid, sizeof(on->uuid), "MIG-%08x-%04x-0000-0000-000000000000", parent->index, i + 1);
        parent->mig_mode = 1;
        return set_target(on, word + 2, count - 2);
    }
    return -1;
}

static int read_run(char **word, int count) {
    int state = state_index(word[2]);
    if (count < 4 || state < 0) return -1;
    long times = 1;
    if (count > 4) {
        char *value = value_of(word[4]);
        if (!value || strcmp(word[4], "times")) return -1;
        times = strtol(value, NULL, 10);
    }
    int64_t duration_ns = duration(word[3]);
    if (duration_ns <= 0) return -1;
    if (!strcmp(word[1], "*")) {
        for (int i = 0; i < device_count; i++) run(&devices[i].line, state, duration_ns, times);
        return 0;
    }
    target *on = place(word[1]);
    if (!on || !on->used) return -1;
    run(&on->line, state, duration_ns, times);
    return 0;
}

static int read_rule(enum kind kind, const char *function, char **word, int count) {
    if (rule_count == MAX_RULES) return -1;
    rule *new = &rules[rule_count++];
    *new = (rule){.kind = kind, .device = ANY, .instance = ANY, .item = ANY, .from = 1, .code = UNKNOWN};
    new->count = INT64_MAX, new->after_ns = INT64_MIN, new->until_ns = INT64_MAX;
    copy(new->function, sizeof(new->function), function);
    for (int i = 0; i < count; i++) {
        char *value = value_of(word[i]);
        if (!value) return -1;
        const char *key = word[i];
        if (!strcmp(key, "code")) new->code = strtol(value, NULL, 10);
        else if (!strcmp(key, "set")) new->value = strtod(value, NULL);
        else if (!strcmp(key, "lasting")) new->sleep_ns = duration(value);
        else if (!strcmp(key, "while")) copy(new->held, sizeof(new->held), value);
        else if (!strcmp(key, "item")) new->item = strtol(value, NULL, 10);
        else if (!strcmp(key, "from")) new->from = strtol(value, NULL, 10);
        else if (!strcmp(key, "count")) new->count = strtol(value, NULL, 10);
        else if (!strcmp(key, "after")) new->after_ns = duration(value);
        else if (!strcmp(key, "until")) new->until_ns = duration(value);
        else if (!strcmp(key, "device")) {
            char *part;
            new->device = strtol(value, &part, 10);
            new->instance = *part == ':' ? strtol(part + 1, NULL, 10) : ANY;
        } else return -1;
    }
    return 0;
}

static int read_clock(char **word, int count) {
    if (!strcmp(word[1], "real")) clock_kind = REAL;
    else if (!strcmp(word[1], "set")) clock_kind = SET;
    else if (!strcmp(word[1], "file") && count == 3) {
        int file = open(word[2], O_RDONLY | O_CLOEXEC);
        if (file < 0) return -1;
        void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        close(file);
        if (mapped == MAP_FAILED) return -1;
        shared_ns = mapped;
        clock_kind = SHARED;
    } else return -1;
    origin_ns = clock_kind == REAL ? standin_clock_ns() : 0;
    return 0;
}

static int read_state(char **word, int count) {
    int at = state_add(word[1]);
    if (at < 0) return -1;
    for (int i = 2; i < count; i++) {
        char *value = value_of(word[i]);
        if (!value || state_set(at, word[i], strtod(value, NULL))) return -1;
    }
    states_finish();
    return 0;
}

static int read_line(char **word, int count) {
    const char *first = word[0];
    if (count < 2) return -1;
    if (!strcmp(first, "device")) return read_device(word, count);
    if (!strcmp(first, "instance")) return read_instance(word, count);
    if (!strcmp(first, "state")) return read_state(word, count);
    if (!strcmp(first, "clock")) return read_clock(word, count);
    if (!strcmp(first, "run")) return count < 3 ? -1 : read_run(word, count);
    if (!strcmp(first, "fault")) return read_rule(FAULT, word[1], word + 2, count - 2);
    if (!strcmp(first, "value")) return read_rule(VALUE, word[1], word + 2, count - 2);
    if (!strcmp(first, "sleep")) return read_rule(SLEEP, word[1], word + 2, count - 2);
    if (!strcmp(first, "repeat")) {
        if (!strcmp(word[1], "*")) {
            for (int i = 0; i < device_count; i++) devices[i].line.repeats = 1;
            return 0;
        }
        target *on = place(word[1]);
        if (!on) return -1;
        on->line.repeats = 1;
        return 0;
    }
    if (!strcmp(first, "driver")) return copy(config.driver, sizeof(config.driver), word[1]), 0;
    if (!strcmp(first, "library")) return copy(config.library, sizeof(config.library), word[1]), 0;
    if (!strcmp(first, "log")) return copy(log_path, sizeof(log_path), word[1]), 0;
    if (!strcmp(first, "cuda")) return config.cuda = strtol(word[1], NULL, 10), 0;
    if (!strcmp(first, "origin")) return origin_ns = strtoll(word[1], NULL, 10), 0;
    if (!strcmp(first, "noise")) return config.noise = strtod(word[1], NULL), 0;
    if (!strcmp(first, "seed")) return config.seed = strtoull(word[1], NULL, 10), 0;
    if (!strcmp(first, "refresh")) return config.refresh_ns = duration(word[1]), 0;
    if (!strcmp(first, "energy_period")) return config.energy_period_ns = duration(word[1]), 0;
    if (!strcmp(first, "power_window")) return config.power_window_ns = duration(word[1]), 0;
    return -1;
}

static void clear(void) {
    for (int i = 0; i < MAX_DEVICES; i++) {
        free(devices[i].line.segments);
        for (int j = 0; j < MAX_INSTANCES; j++) free(instances[i][j].line.segments);
    }
    memset(devices, 0, sizeof(devices));
    memset(instances, 0, sizeof(instances));
    device_count = rule_count = 0;
    log_path[0] = 0;
    clock_kind = REAL;
    origin_ns = standin_clock_ns();
    states_clear();
    state_add("idle");
    config = (settings){.driver = "580.95.05", .library = "13.580.95.05", .cuda = 13000, .seed = 1};
    config.energy_period_ns = 100000000, config.power_window_ns = 1000000000;
}

static int load(const char *path) {
    clear();
    FILE *file = fopen(path, "r");
    if (!file) return DRIVER_NOT_LOADED;
    char *line = NULL, *word[MAX_WORDS];
    size_t room = 0;
    int number = 0, code = SUCCESS;
    ssize_t length;
    while (code == SUCCESS && (length = getline(&line, &room, file)) >= 0) {
        number++;
        if (length && line[length - 1] == '\n') line[length - 1] = 0;
        int count = words(line, word);
        if (count && read_line(word, count)) {
            fprintf(stderr, "the stand-in for NVML does not understand line %d of %s\n", number, path);
            code = UNKNOWN;
        }
    }
    free(line);
    fclose(file);
    if (code == SUCCESS) copy(loaded, sizeof(loaded), path);
    return code;
}

/* Judging calls */

static int applies(rule *one, const char *function, const target *on, long item, int exact_item) {
    if (strcmp(one->function, "*") && strcmp(one->function, function)) return 0;
    if (one->device != ANY && (!on || on->index != one->device)) return 0;
    if (one->instance != ANY && (!on || on->instance != one->instance)) return 0;
    if (one->item == ANY ? exact_item : one->item != item) return 0;
    int64_t at = now_ns();
    if (at < one->after_ns || at >= one->until_ns) return 0;
    one->seen++;
    return one->seen >= one->from && one->seen - one->from < one->count;
}

static void note(const char *function, const target *on, long item, int code) {
    if (!log_path[0]) return;
    char line[160];
    int length = snprintf(line, sizeof(line), "%d %s %d:%d %ld %d\n", (int)getpid(), function, on ? on->index : -1,
                          on ? on->instance : -1, item, code);
    int file = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    if (write(file, line, length) < 0) errno = 0;
    close(file);
}

static int judge(const char *function, const target *on, long item, int exact_item, pause_of *sleep) {
    int code = SUCCESS;
    for (int i = 0; i < rule_count; i++) {
        if (rules[i].kind == VALUE || !applies(&rules[i], function, on, item, exact_item)) continue;
        if (rules[i].kind == SLEEP) {
            sleep->duration_ns += rules[i].sleep_ns;
            if (rules[i].held[0]) copy(sleep->held, sizeof(sleep->held), rules[i].held);
        } else if (code == SUCCESS) code = rules[i].code;
    }
    return code;
}

int enter(const char *function, const target *on, long item) {
    pause_of sleep = {0};
    pthread_mutex_lock(&mutex);
    int code = references && owner == getpid() ? SUCCESS : UNINITIALIZED;
    if (code == SUCCESS) code = judge(function, on, item, 0, &sleep);
    note(function, on, item, code);
    pthread_mutex_unlock(&mutex);
    rest(&sleep);
    return code;
}

int item_code(const char *function, const target *on, long item) {
    pause_of sleep = {0};
    pthread_mutex_lock(&mutex);
    int code = judge(function, on, item, 1, &sleep);
    note(function, on, item, code);
    pthread_mutex_unlock(&mutex);
    rest(&sleep);
    return code;
}

double scripted(const char *function, const target *on, long item, double value) {
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < rule_count; i++)
        if (rules[i].kind == VALUE && applies(&rules[i], function, on, item, 0)) value = rules[i].value;
    pthread_mutex_unlock(&mutex);
    return value;
}

int opens(void) {
    pause_of sleep = {0};
    const char *path = getenv("NVML_STANDIN_SCRIPT");
    pthread_mutex_lock(&mutex);
    int code = path ? SUCCESS : DRIVER_NOT_LOADED;
    /* What a fork copied is not the child's. */
    if (owner != getpid()) references = 0;
    if (code == SUCCESS && !references && strcmp(loaded, path)) code = load(path);
    if (code == SUCCESS) {
        code = judge("nvmlInit", NULL, NO_ITEM, 0, &sleep);
        note("nvmlInit", NULL, NO_ITEM, code);
    }
    if (code == SUCCESS) references++, owner = getpid();
    pthread_mutex_unlock(&mutex);
    rest(&sleep);
    return code;
}

int closes(void) {
    int code = enter("nvmlShutdown", NULL, NO_ITEM);
    pthread_mutex_lock(&mutex);
    if (code == SUCCESS) references--;
    pthread_mutex_unlock(&mutex);
    return code;
}

target *known(void *handle) {
    target *on = handle;
    int is_device = on >= devices && on < devices + MAX_DEVICES;
    int is_instance = on >= &instances[0][0] && on <= &instances[MAX_DEVICES - 1][MAX_INSTANCES - 1];
    return (is_device || is_instance) && on->used ? on : NULL;
}

/* For tests: how often it is open in this process, and forgetting the script. */
EXPORT long standin_references(void) { return owner == getpid() ? references : 0; }

EXPORT void standin_forget(void) {
    pthread_mutex_lock(&mutex);
    references = 0;
    loaded[0] = 0;
    pthread_mutex_unlock(&mutex);
}
