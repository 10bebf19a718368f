/* A stand-in for libnvidia-ml.so.1, for tests on machines without a GPU.
 *
 * It implements what aiogpu asks of NVML, by the ABI that nvidia-ml-py 13 uses, and
 * tells what the file named by AIOGPU_STUB_NVML_STATE says at that very call, so
 * that a test may change the world while a program runs. One thing a line:
 *
 *   driver VERSION
 *   init_error CODE                    nvmlInit fails with that nvmlReturn_t
 *   fail FUNCTION CODE                 that function fails, for all devices
 *   device UUID PCI TOTAL USED NAME    the name is the rest of the line
 *   process INDEX PID BYTES            a process on a device named before, on the
 *                                      compute list; -1 bytes are not available
 *   mps INDEX PID BYTES                the same on the list of MPS clients
 *   graphics INDEX PID BYTES           the same on the graphics list
 *   lost INDEX                         all about it fails with GPU_IS_LOST
 *   forbidden INDEX                    its handle fails with NO_PERMISSION
 *
 * Where AIOGPU_STUB_NVML_CALLS names a file, each call's function is added to it.
 * A line that is none of these makes every call fail with UNKNOWN (999). To leave a
 * symbol out, compile with -DnvmlName=absent_nvmlName.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    UNKNOWN = 999
};

enum { DEVICES = 32, PROCESSES = 256, FAILURES = 16, TEXT = 96, LINE = 256 };

typedef void *Handle; /* the device's index, plus one */

typedef struct {
    char uuid[TEXT], pci[TEXT], name[TEXT];
    unsigned long long total, used;
    int lost, forbidden;
} Device;

enum { COMPUTE, MPS, GRAPHICS };

typedef struct {
    int device, list;
    unsigned pid;
    unsigned long long bytes;
} Process;

typedef struct {
    char function[TEXT];
    int code;
} Failure;

typedef struct {
    char driver[TEXT];
    int init_error, devices, processes, failures;
    Device device[DEVICES];
    Process process[PROCESSES];
    Failure failure[FAILURES];
} State;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory2;

typedef struct {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} Pci;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} ProcessInfo;

static int started; /* as NVML, which counts its starts and shutdowns */

static int read_line(State *s, const char *line)
{
    int index, code;
    Device d = {0};
    Process p = {0};
    Failure f = {0};

    if (sscanf(line, "driver %95s", s->driver) == 1) return 1;
    if (sscanf(line, "init_error %d", &s->init_error) == 1) return 1;
    if (sscanf(line, "fail %95s %d", f.function, &code) == 2) {
        if (s->failures == FAILURES) return 0;
        f.code = code;
        s->failure[s->failures++] = f;
        return 1;
    }
    if (sscanf(line, "device %95s %95s %llu %llu %95[^\n]",
               d.uuid, d.pci, &d.total, &d.used, d.name) == 5) {
        if (s->devices == DEVICES) return 0;
        s->device[s->devices++] = d;
        return 1;
    }
    if (sscanf(line, "process %d %u %llu", &p.device, &p.pid, &p.bytes) == 3)
        p.list = COMPUTE;
    else if (sscanf(line, "mps %d %u %llu", &p.device, &p.pid, &p.bytes) == 3)
        p.list = MPS;
    else if (sscanf(line, "graphics %d %u %llu", &p.device, &p.pid, &p.bytes) == 3)
        p.list = GRAPHICS;
    else
        p.list = -1;
    if (p.list >= 0) {
        if (s->processes == PROCESSES) return 0;
        if (p.device < 0 || p.device >= s->devices) return 0;
        s->process[s->processes++] = p;
        return 1;
    }
    if (sscanf(line, "lost %d", &index) == 1 && 0 <= index && index < s->devices)
        return s->device[index].lost = 1;
    if (sscanf(line, "forbidden %d", &index) == 1 && 0 <= index && index < s->devices)
        return s->device[index].forbidden = 1;
    return 0;
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
    for (int i = 0; i < s->failures; i++)
        if (!strcmp(s->failure[i].function, function)) return s->failure[i].code;
    return SUCCESS;
}

static int look_started(State *s, const char *function)
{
    return started ? look(s, function) : UNINITIALIZED;
}

/* The same for a function of one device, which is put into `*device`. */
static int look_at(State *s, const char *function, Handle handle, Device **device)
{
    int code = look_started(s, function);
    intptr_t index = (intptr_t)handle - 1;

    if (code) return code;
    if (index < 0) return INVALID_ARGUMENT;
    if (index >= s->devices) return GPU_IS_LOST; /* was there before */
    *device = &s->device[index];
    return (*device)->lost ? GPU_IS_LOST : SUCCESS;
}

static int copy(char *to, unsigned size, const char *from)
{
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags)
{
    State s;
    int code = look(&s, __func__);

    (void)flags;
    if (!code) code = s.init_error;
    if (!code) started++;
    return code;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    if (!started) return UNINITIALIZED;
    started--;
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    State s;
    int code = look_started(&s, __func__);

    return code ? code : copy(version, size, s.driver);
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
    State s;
    int code = look_started(&s, __func__);

    *count = code ? 0 : (unsigned)s.devices;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle)
{
    State s;
    int code = look_started(&s, __func__);

    if (code) return code;
    if (index >= (unsigned)s.devices) return INVALID_ARGUMENT;
    if (s.device[index].forbidden) return NO_PERMISSION;
    if (s.device[index].lost) return GPU_IS_LOST;
    *handle = (Handle)((intptr_t)index + 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *handle)
{
    State s;
    int code = look_started(&s, __func__);

    for (int i = 0; !code && i < s.devices; i++)
        if (!strcmp(s.device[i].uuid, uuid))
            return nvmlDeviceGetHandleByIndex_v2((unsigned)i, handle);
    return code ? code : NOT_FOUND;
}

int nvmlDeviceGetUUID(Handle handle, char *uuid, unsigned size)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    return code ? code : copy(uuid, size, d->uuid);
}

int nvmlDeviceGetName(Handle handle, char *name, unsigned size)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    return code ? code : copy(name, size, d->name);
}

int nvmlDeviceGetPciInfo_v3(Handle handle, Pci *pci)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (code) return code;
    memset(pci, 0, sizeof *pci);
    if (sscanf(d->pci, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3)
        return UNKNOWN;
    copy(pci->legacy_id, sizeof pci->legacy_id, d->pci);
    return copy(pci->id, sizeof pci->id, d->pci);
}

int nvmlDeviceGetMemoryInfo(Handle handle, Memory *memory)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (!code) *memory = (Memory){d->total, d->total - d->used, d->used};
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(Handle handle, Memory2 *memory)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (!code)
        *memory = (Memory2){memory->version, d->total, 0, d->total - d->used, d->used};
    return code;
}

/* Called twice: with too little room it says how much is needed. */
static int list(const char *function, int which, Handle handle, unsigned *count,
                ProcessInfo *infos)
{
    State s;
    Device *d;
    int code = look_at(&s, function, handle, &d);
    unsigned room = *count, found = 0;

    if (code) return code;
    for (int i = 0; i < s.processes; i++) {
        Process *p = &s.process[i];

        if (&s.device[p->device] != d || p->list != which) continue;
        if (infos && found < room)
            infos[found] = (ProcessInfo){p->pid, p->bytes, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle h, unsigned *count, ProcessInfo *to)
{
    return list(__func__, COMPUTE, h, count, to);
}

int nvmlDeviceGetComputeRunningProcesses_v2(Handle h, unsigned *count, ProcessInfo *to)
{
    return list(__func__, COMPUTE, h, count, to);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(Handle h, unsigned *count,
                                               ProcessInfo *to)
{
    return list(__func__, MPS, h, count, to);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle h, unsigned *count, ProcessInfo *to)
{
    return list(__func__, GRAPHICS, h, count, to);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(Handle h, unsigned *count, ProcessInfo *to)
{
    return list(__func__, GRAPHICS, h, count, to);
}
