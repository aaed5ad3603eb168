/* A stand-in for libnvidia-ml.so.1 that tests drive by a text file, read again on every call (named by FAKE_NVML_STATE).
 *
 * One GPU a line, words of key=value ('_' in a name becomes a space):
 *   uuid= name= util= memutil= used= total= (MiB) power= limit= default= (mW) temp= sm= smmax= memclk= throttle= (hex) pstate=
 *   gen= genmax= width= widthmax= ecc= energy= (mJ) procs=PID:MIB,PID:MIB  mig=UUID:USED:TOTAL,...
 *   lost=1    every call on the card answers "GPU is lost"      hang=1   every call on the card blocks for ever
 *   fail=KEY:CODE,KEY:CODE    that call answers the NVML error code (3 not supported, 999 unknown)
 * No file: the driver is not loaded. Build: gcc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 nvml_stub.c
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CARDS 16
#define LINE 4096
enum { OK = 0, NOT_LOADED = 9, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15 };

static char cards[CARDS][LINE];

static int load(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    int n = 0;
    if (!file) return -1;
    while (n < CARDS && fgets(cards[n], LINE, file))
        if (strchr(cards[n], '=')) n++;
    fclose(file);
    return n;
}

/* the text of a key, NULL when the line has none */
static const char *word(const char *line, const char *key) {
    static char value[LINE];
    size_t length = strlen(key);
    const char *at = line;
    while ((at = strstr(at, key))) {
        if ((at == line || at[-1] == ' ') && at[length] == '=') {
            sscanf(at + length + 1, "%4095[^ \n]", value);
            if (at[length + 1] == ' ' || at[length + 1] == '\n') value[0] = 0;
            return value;
        }
        at += length;
    }
    return NULL;
}

/* the line of a handle; *error says why there is none. Handles: card + 1, and for a MIG instance 1000 * (card + 1) + instance */
static const char *card(void *handle, const char *key, int *error) {
    long number = (long)handle, index = (number >= 1000 ? number / 1000 : number) - 1;
    int count = load();
    const char *fail, *code;
    char wanted[64];
    if (count < 0) { *error = NOT_LOADED; return NULL; }
    if (index < 0 || index >= count) { *error = INVALID; return NULL; }
    if (word(cards[index], "hang")) for (;;) pause();
    if (word(cards[index], "lost")) { *error = LOST; return NULL; }
    snprintf(wanted, sizeof wanted, "%s:", key);
    fail = word(cards[index], "fail");
    if (fail && (code = strstr(fail, wanted))) { *error = atoi(code + strlen(wanted)); return NULL; }
    *error = OK;
    return cards[index];
}

static int number(void *handle, const char *key, int base, unsigned long long *value) {
    int error;
    const char *line = card(handle, key, &error), *text;
    if (!line) return error;
    text = word(line, key);
    if (!text) return NOT_SUPPORTED;
    *value = strtoull(text, NULL, base);
    return OK;
}

static int small(void *handle, const char *key, unsigned *value) {
    unsigned long long wide = 0;
    int error = number(handle, key, 10, &wide);
    if (!error) *value = (unsigned)wide;
    return error;
}

int nvmlInit_v2(void) { return load() < 0 ? NOT_LOADED : OK; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int error) {
    switch (error) {
        case NOT_SUPPORTED: return "Not Supported";
        case NOT_LOADED: return "Driver Not Loaded";
        case LOST: return "GPU is lost";
        default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "580.95.05"); return OK; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    int n = load();
    if (n < 0) return NOT_LOADED;
    *count = (unsigned)n;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if ((int)index >= load()) return INVALID;
    *handle = (void *)(long)(index + 1);
    return OK;
}

/* the i-th part of a comma list, split at ':' */
static int part(const char *list, int i, char fields[3][128]) {
    for (; list && i > 0; i--) { list = strchr(list, ','); if (list) list++; }
    if (!list || !*list) return 0;
    fields[0][0] = fields[1][0] = fields[2][0] = 0;
    return sscanf(list, "%127[^:,]:%127[^:,]:%127[^:,]", fields[0], fields[1], fields[2]);
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    int error;
    const char *line = card(handle, "uuid", &error);
    char fields[3][128];
    if (!line) return error;
    if ((long)handle >= 1000) {
        if (!part(word(line, "mig"), (int)((long)handle % 1000), fields)) return NOT_FOUND;
        snprintf(text, length, "%s", fields[0]);
        return OK;
    }
    snprintf(text, length, "%s", word(line, "uuid"));
    return OK;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned length) {
    int error;
    const char *line = card(handle, "name", &error), *name;
    if (!line) return error;
    name = word(line, "name");
    snprintf(text, length, "%s%s", name ? name : "Stub", (long)handle >= 1000 ? "_MIG_1g.10gb" : "");
    for (; *text; text++) if (*text == '_') *text = ' ';
    return OK;
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    int error = small(handle, "util", rates);
    return error ? error : small(handle, "memutil", rates + 1);
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *info) {
    unsigned long long used = 0, total = 0;
    int error;
    if ((long)handle >= 1000) {
        char fields[3][128];
        const char *line = card(handle, "mig", &error);
        if (!line) return error;
        if (part(word(line, "mig"), (int)((long)handle % 1000), fields) != 3) return NOT_SUPPORTED;
        used = strtoull(fields[1], NULL, 10), total = strtoull(fields[2], NULL, 10);
    } else {
        if ((error = number(handle, "used", 10, &used)) || (error = number(handle, "total", 10, &total))) return error;
    }
    unsigned long long reserved = 0;
    number(handle, "reserved", 10, &reserved); /* the first version of the call counts it as used */
    used += reserved;
    info[0] = total << 20, info[1] = (total - used) << 20, info[2] = used << 20;
    return OK;
}

/* {version, total, reserved, free, used}; a driver that knows it has a `reserved` field in its state */
int nvmlDeviceGetMemoryInfo_v2(void *handle, unsigned long long *info) {
    unsigned long long reserved, used, total;
    int error;
    if ((error = number(handle, "reserved", 10, &reserved))) return error;
    if ((error = number(handle, "used", 10, &used)) || (error = number(handle, "total", 10, &total))) return error;
    info[1] = total << 20, info[2] = reserved << 20, info[3] = (total - used - reserved) << 20, info[4] = used << 20;
    return OK;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *value) { return small(handle, "power", value); }
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *value) { return small(handle, "limit", value); }
int nvmlDeviceGetPowerManagementDefaultLimit(void *handle, unsigned *value) { return small(handle, "default", value); }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *value) { (void)sensor; return small(handle, "temp", value); }

/* {version, sensor, temperature} */
int nvmlDeviceGetTemperatureV(void *handle, int *record) {
    unsigned value = 0;
    int error = small(handle, "temp", &value);
    if (!error) record[2] = (int)value;
    return error;
}

int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *value) { return small(handle, type == 2 ? "memclk" : "sm", value); }
int nvmlDeviceGetMaxClockInfo(void *handle, int type, unsigned *value) { (void)type; return small(handle, "smmax", value); }
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *mask) { return number(handle, "throttle", 16, mask); }
int nvmlDeviceGetPerformanceState(void *handle, unsigned *value) { return small(handle, "pstate", value); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *handle, unsigned *value) { return small(handle, "gen", value); }
int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, unsigned *value) { return small(handle, "genmax", value); }
int nvmlDeviceGetCurrPcieLinkWidth(void *handle, unsigned *value) { return small(handle, "width", value); }
int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned *value) { return small(handle, "widthmax", value); }

int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, unsigned long long *value) {
    (void)type, (void)counter;
    return number(handle, "ecc", 10, value);
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *value) { return number(handle, "energy", 10, value); }

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    int error;
    const char *line = card(handle, "mig", &error);
    if (!line) return error;
    *current = *pending = word(line, "mig") != NULL;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { (void)handle; *count = 7; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **part_handle) {
    int error;
    const char *line = card(handle, "mig", &error);
    char fields[3][128];
    if (!line) return error;
    if (!part(word(line, "mig"), (int)index, fields)) return NOT_FOUND;
    *part_handle = (void *)((long)handle * 1000 + index);
    return OK;
}

typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } Process;

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *found) {
    int error;
    const char *line = card(handle, "procs", &error);
    char fields[3][128];
    unsigned n = 0;
    if (!line) return error;
    while (part(word(line, "procs"), (int)n, fields)) {
        if (n < *count && found) {
            found[n].pid = (unsigned)atoi(fields[0]);
            found[n].used = fields[1][0] ? strtoull(fields[1], NULL, 10) << 20 : ~0ULL;  /* hidden, as in containers */
            found[n].instance = found[n].compute = ~0u;
        }
        n++;
    }
    error = n > *count ? TOO_SMALL : OK;
    *count = n;
    return error;
}
