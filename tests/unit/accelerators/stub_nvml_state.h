/* What the NVML stub tells: its state file, read anew at each call. One thing a line:
 *
 *   driver VERSION
 *   init_error CODE                    nvmlInit fails with that nvmlReturn_t
 *   fail FUNCTION CODE                 that function fails, for all devices
 *   device UUID PCI TOTAL USED NAME    the name is the rest of the line
 *   capability INDEX MAJOR MINOR       of a device named before, as all INDEX are
 *   utilisation INDEX PERCENT          not supported where it is not told
 *   temperature INDEX DEGREES          the same
 *   power INDEX MILLIWATTS             the same
 *   action INDEX CODE                  what has to be done to recover; -1: no word
 *   link INDEX INDEX                   NVLink joins the two
 *   mig_mode INDEX                     the GPU is in MIG mode, perhaps without instance
 *   mig INDEX UUID GI CI TOTAL USED NAME    an instance of a GPU, then in MIG mode
 *   process INDEX PID BYTES            a process on the compute list; -1 bytes are not
 *                                      available
 *   mps INDEX PID BYTES                the same on the list of MPS clients
 *   graphics INDEX PID BYTES           the same on the graphics list
 *   mig_process NUMBER PID BYTES       the same on the compute list of an instance,
 *                                      which are numbered over all GPUs
 *   lingering INDEX PID BYTES MS       on the compute list and in memory while the
 *                                      process lives, and so long after its end was
 *                                      seen
 *   xid TIME INDEX NUMBER GI CI        an event at that time of CLOCK_MONOTONIC, in ns;
 *                                      INDEX -1: its device cannot be told; GI and CI
 *                                      are -1 where it is of the whole GPU
 *   lost INDEX                         all about it fails with GPU_IS_LOST
 *   gone INDEX                         the same until NVML is started anew after that
 *   forbidden INDEX                    its handle fails with NO_PERMISSION
 *
 * A line that is none of these makes every call fail with UNKNOWN (999).
 */
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    RESET_REQUIRED = 16,
    UNKNOWN = 999
};

enum { DEVICES = 32, INSTANCES = 64, PROCESSES = 256, FAILURES = 16, XIDS = 64 };
enum { TEXT = 96, LINE = 320 };

typedef unsigned long long Bytes;

typedef struct {
    char uuid[TEXT], pci[TEXT], name[TEXT];
    Bytes total, used;
    int lost, gone, forbidden, mig, major, minor, utilisation, temperature, power, action;
    uint32_t links; /* a bit for each device */
} Device;

typedef struct {
    char uuid[TEXT], name[TEXT];
    Bytes total, used;
    int parent;
    unsigned gpu, compute;
} Instance;

enum { COMPUTE, MPS, GRAPHICS };

typedef struct {
    int device, instance, list; /* the instance is -1 for a whole GPU */
    unsigned pid;
    Bytes bytes;
} Process;

typedef struct {
    char function[TEXT];
    int code;
} Failure;

typedef struct {
    long long time;
    int device, gpu, compute;
    unsigned number;
} Xid;

typedef struct {
    char driver[TEXT];
    int init_error, devices, instances, processes, failures, xids;
    Device device[DEVICES];
    Instance instance[INSTANCES];
    Process process[PROCESSES];
    Failure failure[FAILURES];
    Xid xid[XIDS];
} State;

static int started; /* as NVML, which counts its starts and shutdowns */
static int gone[DEVICES]; /* and remembers whom it has lost in between */

static long long now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Whether a process lives, or its end was first seen less than `ms` ago. */
static int lingers(unsigned pid, long long ms)
{
    static struct { unsigned pid; long long seen; } ended[PROCESSES];
    int i = 0;

    if (!kill((pid_t)pid, 0) || errno == EPERM) return 1;
    while (i < PROCESSES - 1 && ended[i].pid && ended[i].pid != pid) i++;
    if (ended[i].pid != pid) {
        ended[i].pid = pid;
        ended[i].seen = now();
    }
    return now() - ended[i].seen < ms * 1000000;
}

static int add_process(State *s, Process p)
{
    if (s->processes == PROCESSES) return 0;
    if (p.device < 0 || p.device >= s->devices) return 0;
    s->process[s->processes++] = p;
    return 1;
}

static int read_process(State *s, const char *line)
{
    Process p = {.instance = -1};
    long long ms;

    if (sscanf(line, "process %d %u %llu", &p.device, &p.pid, &p.bytes) == 3)
        p.list = COMPUTE;
    else if (sscanf(line, "mps %d %u %llu", &p.device, &p.pid, &p.bytes) == 3)
        p.list = MPS;
    else if (sscanf(line, "graphics %d %u %llu", &p.device, &p.pid, &p.bytes) == 3)
        p.list = GRAPHICS;
    else if (sscanf(line, "mig_process %d %u %llu", &p.instance, &p.pid,
                    &p.bytes) == 3) {
        if (p.instance < 0 || p.instance >= s->instances) return 0;
        p.device = s->instance[p.instance].parent;
    } else if (sscanf(line, "lingering %d %u %llu %lld", &p.device, &p.pid, &p.bytes,
                      &ms) == 4) {
        if (!lingers(p.pid, ms)) return 1;
        if (!add_process(s, p)) return 0;
        s->device[p.device].used += p.bytes;
        return 1;
    } else
        return 0;
    return add_process(s, p);
}

/* A line about one device that is there. */
static int read_detail(State *s, const char *line)
{
    char word[TEXT];
    int index, a = 0, b = 0;
    int found = sscanf(line, "%95s %d %d %d", word, &index, &a, &b);
    Device *d;

    if (found < 2 || index < 0 || index >= s->devices) return 0;
    d = &s->device[index];
    if (!strcmp(word, "lost")) return d->lost = 1;
    if (!strcmp(word, "gone")) return d->gone = 1;
    if (!strcmp(word, "forbidden")) return d->forbidden = 1;
    if (!strcmp(word, "mig_mode")) return d->mig = 1;
    if (found == 2) return 0;
    if (!strcmp(word, "utilisation"))
        d->utilisation = a;
    else if (!strcmp(word, "temperature"))
        d->temperature = a;
    else if (!strcmp(word, "power"))
        d->power = a;
    else if (!strcmp(word, "action"))
        d->action = a;
    else if (!strcmp(word, "link") && 0 <= a && a < s->devices) {
        d->links |= 1u << a;
        s->device[a].links |= 1u << index;
    } else if (!strcmp(word, "capability") && found == 4) {
        d->major = a;
        d->minor = b;
    } else
        return 0;
    return 1;
}

static int read_line(State *s, const char *line)
{
    Device d = {.utilisation = -1, .temperature = -1, .power = -1};
    Instance m = {0};
    Failure f = {0};
    Xid x = {0};

    if (sscanf(line, "driver %95s", s->driver) == 1) return 1;
    if (sscanf(line, "init_error %d", &s->init_error) == 1) return 1;
    if (sscanf(line, "fail %95s %d", f.function, &f.code) == 2) {
        if (s->failures == FAILURES) return 0;
        s->failure[s->failures++] = f;
        return 1;
    }
    if (sscanf(line, "device %95s %95s %llu %llu %95[^\n]",
               d.uuid, d.pci, &d.total, &d.used, d.name) == 5) {
        if (s->devices == DEVICES) return 0;
        s->device[s->devices++] = d;
        return 1;
    }
    if (sscanf(line, "mig %d %95s %u %u %llu %llu %95[^\n]", &m.parent, m.uuid, &m.gpu,
               &m.compute, &m.total, &m.used, m.name) == 7) {
        if (m.parent < 0 || m.parent >= s->devices) return 0;
        if (s->instances == INSTANCES) return 0;
        s->instance[s->instances++] = m;
        return s->device[m.parent].mig = 1;
    }
    if (sscanf(line, "xid %lld %d %u %d %d", &x.time, &x.device, &x.number, &x.gpu,
               &x.compute) == 5) {
        if (x.device < -1 || x.device >= s->devices || s->xids == XIDS) return 0;
        s->xid[s->xids++] = x;
        return 1;
    }
    return read_process(s, line) || read_detail(s, line);
}

static void note_call(const char *function)
{
    const char *path = getenv("AIOGPU_STUB_NVML_CALLS");
    FILE *file = path ? fopen(path, "a") : NULL;

    if (!file) return;
    fprintf(file, "%s\n", function);
    fclose(file);
}

/* Read the state and say whether `function` may go on. */
static int look(State *s, const char *function)
{
    const char *path = getenv("AIOGPU_STUB_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[LINE];
    int fine = 1;

    note_call(function);
    memset(s, 0, sizeof *s);
    if (!file) return UNKNOWN;
    while (fine && fgets(line, sizeof line, file)) fine = read_line(s, line);
    fclose(file);
    if (!fine) return UNKNOWN;
    for (int i = 0; i < s->devices; i++) {
        gone[i] |= s->device[i].gone;
        s->device[i].lost |= gone[i];
    }
    for (int i = 0; i < s->failures; i++)
        if (!strcmp(s->failure[i].function, function)) return s->failure[i].code;
    return SUCCESS;
}

static int look_started(State *s, const char *function)
{
    return started ? look(s, function) : UNINITIALIZED;
}
