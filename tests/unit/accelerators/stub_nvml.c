/* A stand-in for libnvidia-ml.so.1, for tests on machines without a GPU.
 *
 * It implements what aiogpu asks of NVML, by the ABI that nvidia-ml-py 13 uses, and
 * tells what the file named by AIOGPU_STUB_NVML_STATE says at that very call, so
 * that a test may change the world while a program runs; `stub_nvml_state.h` says what
 * may stand in it.
 *
 * Where AIOGPU_STUB_NVML_CALLS names a file, each call's function is added to it.
 * To leave a symbol out, compile with -DnvmlName=absent_nvmlName.
 */
#define _POSIX_C_SOURCE 200809L
#include "stub_nvml_state.h"

/* The device's index, or the instance's number and `INSTANCE`, plus one. */
typedef void *Handle;
enum { INSTANCE = 1000 };

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

typedef struct {
    unsigned gpu, memory;
} Utilization;

typedef struct {
    unsigned field, scope;
    int64_t timestamp, latency;
    unsigned type;
    int code;
    union {
        double d;
        unsigned u;
        unsigned long long ull;
    } value;
} FieldValue;

typedef struct {
    Handle device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} EventData;

typedef struct {
    long long since[DEVICES]; /* when each was registered, 0 for never */
    long long last;           /* the time of the event that was told last */
} EventSet;

/* The same for a function of one device or instance, which is put into `*device` and
 * `*instance`, the latter NULL for a whole GPU. */
static int look_at_part(State *s, const char *function, Handle handle, Device **device,
                        Instance **instance)
{
    int code = look_started(s, function);
    intptr_t index = (intptr_t)handle - 1;

    *instance = NULL;
    if (code) return code;
    if (index < 0) return INVALID_ARGUMENT;
    if (index >= INSTANCE) {
        if (index - INSTANCE >= s->instances) return INVALID_ARGUMENT;
        *instance = &s->instance[index - INSTANCE];
        index = (*instance)->parent;
    }
    if (index >= s->devices) return GPU_IS_LOST; /* was there before */
    *device = &s->device[index];
    return (*device)->lost ? GPU_IS_LOST : SUCCESS;
}

/* The same for a function of whole GPUs alone. */
static int look_at(State *s, const char *function, Handle handle, Device **device)
{
    Instance *instance;
    int code = look_at_part(s, function, handle, device, &instance);

    return code ? code : instance ? NOT_SUPPORTED : SUCCESS;
}

static Handle handle_of(int index) { return (Handle)((intptr_t)index + 1); }

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
    if (!--started) memset(gone, 0, sizeof gone);
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
    case TIMEOUT: return "Timeout";
    case FUNCTION_NOT_FOUND: return "Function Not Found";
    case GPU_IS_LOST: return "GPU is lost";
    case RESET_REQUIRED: return "GPU requires restart";
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
    *handle = handle_of((int)index);
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, Handle *handle)
{
    State s;
    int code = look_started(&s, __func__);

    for (int i = 0; !code && i < s.devices; i++)
        if (!strcmp(s.device[i].pci, pci))
            return nvmlDeviceGetHandleByIndex_v2((unsigned)i, handle);
    return code ? code : NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *handle)
{
    State s;
    int code = look_started(&s, __func__);

    for (int i = 0; !code && i < s.devices; i++)
        if (!strcmp(s.device[i].uuid, uuid))
            return nvmlDeviceGetHandleByIndex_v2((unsigned)i, handle);
    for (int i = 0; !code && i < s.instances; i++)
        if (!strcmp(s.instance[i].uuid, uuid)) {
            *handle = handle_of(INSTANCE + i);
            return SUCCESS;
        }
    return code ? code : NOT_FOUND;
}

int nvmlDeviceGetUUID(Handle handle, char *uuid, unsigned size)
{
    State s;
    Device *d;
    Instance *m;
    int code = look_at_part(&s, __func__, handle, &d, &m);

    return code ? code : copy(uuid, size, m ? m->uuid : d->uuid);
}

int nvmlDeviceGetName(Handle handle, char *name, unsigned size)
{
    State s;
    Device *d;
    Instance *m;
    int code = look_at_part(&s, __func__, handle, &d, &m);

    return code ? code : copy(name, size, m ? m->name : d->name);
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
    Instance *m;
    int code = look_at_part(&s, __func__, handle, &d, &m);

    if (code) return code;
    if (!m && !d->total) return NOT_SUPPORTED; /* its memory is the machine's */
    memory->total = m ? m->total : d->total;
    memory->used = m ? m->used : d->used;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Handle handle, Memory2 *memory)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (!code && !d->total) return NOT_SUPPORTED;
    if (!code)
        *memory = (Memory2){memory->version, d->total, 0, d->total - d->used, d->used};
    return code;
}

int nvmlDeviceGetUtilizationRates(Handle handle, Utilization *to)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (code) return code;
    if (d->utilisation < 0) return NOT_SUPPORTED;
    *to = (Utilization){(unsigned)d->utilisation, 0};
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Handle handle, unsigned sensor, unsigned *to)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (code) return code;
    if (d->temperature < 0 || sensor != 0) return NOT_SUPPORTED;
    *to = (unsigned)d->temperature;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Handle handle, unsigned *milliwatts)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (code) return code;
    if (d->power < 0) return NOT_SUPPORTED;
    *milliwatts = (unsigned)d->power;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(Handle handle, int *major, int *minor)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (code) return code;
    *major = d->major;
    *minor = d->minor;
    return SUCCESS;
}

/* Of all that may be asked it knows about NVLink. */
int nvmlDeviceGetP2PStatus(Handle one, Handle other, unsigned what, unsigned *status)
{
    enum { OF_NVLINK = 2, OK = 0, NO = 5 };
    State s;
    Device *d, *e;
    int code = look_at(&s, __func__, one, &d);

    if (!code) code = look_at(&s, __func__, other, &e);
    if (code) return code;
    if (d == e || what != OF_NVLINK) return INVALID_ARGUMENT;
    *status = d->links >> (e - s.device) & 1 ? OK : NO;
    return SUCCESS;
}

/* Of all fields it knows the action that is needed to recover. */
int nvmlDeviceGetFieldValues(Handle handle, int count, FieldValue *values)
{
    enum { RECOVERY_ACTION = 230, UNSIGNED_INT = 1 };
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (code) return code;
    for (FieldValue *v = values; v < values + count; v++) {
        v->code = v->field == RECOVERY_ACTION && d->action >= 0 ? SUCCESS : NOT_SUPPORTED;
        v->type = UNSIGNED_INT;
        v->value.u = v->code ? 0 : (unsigned)d->action;
    }
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Handle handle, unsigned *current, unsigned *pending)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    if (!code) *current = *pending = (unsigned)d->mig;
    return code;
}

int nvmlDeviceGetMaxMigDeviceCount(Handle handle, unsigned *count)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    *count = !code && d->mig ? 7 : 0;
    return code;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle handle, unsigned index, Handle *to)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    for (int i = 0; !code && i < s.instances; i++)
        if (&s.device[s.instance[i].parent] == d && !index--) {
            *to = handle_of(INSTANCE + i);
            return SUCCESS;
        }
    return code ? code : NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle handle, Handle *to)
{
    State s;
    Device *d;
    Instance *m;
    int code = look_at_part(&s, __func__, handle, &d, &m);

    if (!code) *to = handle_of((int)(d - s.device));
    return code ? code : m ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetGpuInstanceId(Handle handle, unsigned *id)
{
    State s;
    Device *d;
    Instance *m;
    int code = look_at_part(&s, __func__, handle, &d, &m);

    if (!code && m) *id = m->gpu;
    return code ? code : m ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeInstanceId(Handle handle, unsigned *id)
{
    State s;
    Device *d;
    Instance *m;
    int code = look_at_part(&s, __func__, handle, &d, &m);

    if (!code && m) *id = m->compute;
    return code ? code : m ? SUCCESS : NOT_SUPPORTED;
}

int nvmlEventSetCreate(EventSet **set)
{
    State s;
    int code = look_started(&s, __func__);

    *set = code ? NULL : calloc(1, sizeof **set);
    return code;
}

int nvmlEventSetFree(EventSet *set)
{
    State s;
    int code = look_started(&s, __func__);

    if (!code) free(set);
    return code;
}

int nvmlDeviceRegisterEvents(Handle handle, unsigned long long types, EventSet *set)
{
    State s;
    Device *d;
    int code = look_at(&s, __func__, handle, &d);

    (void)types;
    if (!code && !set->since[d - s.device]) set->since[d - s.device] = now();
    return code;
}

/* The first event after the last one; it never waits. */
int nvmlEventSetWait_v2(EventSet *set, EventData *data, unsigned timeout)
{
    enum { XID_CRITICAL_ERROR = 8 };
    State s;
    int code = look_started(&s, __func__);

    (void)timeout;
    if (code) return code;
    for (int i = 0; i < s.xids; i++) {
        Xid *x = &s.xid[i];
        long long since = x->device < 0 ? 1 : set->since[x->device];

        if (!since || x->time < since || x->time <= set->last) continue;
        set->last = x->time;
        *data = (EventData){handle_of(x->device < 0 ? DEVICES : x->device),
                            XID_CRITICAL_ERROR, x->number, (unsigned)x->gpu,
                            (unsigned)x->compute};
        return SUCCESS;
    }
    return TIMEOUT;
}

/* Called twice: with too little room it says how much is needed. */
static int list(const char *function, int which, Handle handle, unsigned *count,
                ProcessInfo *infos)
{
    State s;
    Device *d;
    Instance *m;
    int code = look_at_part(&s, function, handle, &d, &m);
    unsigned room = *count, found = 0;

    if (code) return code;
    for (int i = 0; i < s.processes; i++) {
        Process *p = &s.process[i];

        Instance *of = p->instance < 0 ? NULL : &s.instance[p->instance];

        if (&s.device[p->device] != d || p->list != which) continue;
        if (m && of != m) continue;
        if (infos && found < room)
            infos[found] = (ProcessInfo){p->pid, p->bytes, of ? of->gpu : ~0u,
                                         of ? of->compute : ~0u};
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
