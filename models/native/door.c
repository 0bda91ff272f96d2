/* The door into TensorFlow: its C kernel API alone. Built once, it runs in TensorFlow 2.15 to 2.21.

   CpuConvolve       filters, coefficients, below_coefficients: float; maps: n_maps * T; above, below: n * T -> map: T, sums
   CpuInputGradient  the same, with flipped filters; of CpuConvolve `below` is the sum that is added to
   CpuFilterGradient coefficients, gradient_coefficients: float; maps: n_maps * T; above: n_above * T; gradient: T

   CpuPass           filters, bias, coefficients: float; raw: T; others: n_others * T -> map: T; sums, filter_gradient, bias_gradient

   `above` is the raw map where the input is the gradient of a norm and ReLU; coefficients are empty for raw maps. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "tensorflow.h"
#include "native.h"

int native_run(const char *name, const struct operation *operation);
int native_pass(const char *name, const struct pass *pass);

/* --- Threads, inputs and failures --- */

static int thread_count(void)
{
    const char *wanted = getenv("TF_NUM_INTRAOP_THREADS");
    int threads = wanted ? atoi(wanted) : 0;
    cpu_set_t cpus;
    if (threads < 1 && !sched_getaffinity(getpid(), sizeof cpus, &cpus))
        threads = CPU_COUNT(&cpus);
    return threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
}

enum { MOST_INPUTS = 8, MOST_OUTPUTS = 4, MOST_CHANNELS = 1024 };

/* The inputs and outputs of a call, and the first rule that they break. */
struct call {
    TF_OpKernelContext *context;
    TF_Status *status;
    TF_Tensor *inputs[MOST_INPUTS], *outputs[MOST_OUTPUTS];
    int count;
    bool failed;
};

static void require(struct call *call, bool holds, const char *message)
{
    if (holds || call->failed)
        return;
    call->failed = true;
    TF_SetStatus(call->status, TF_INVALID_ARGUMENT, message);
}

static void open_call(struct call *call, TF_OpKernelContext *context)
{
    *call = (struct call){.context = context, .status = TF_NewStatus(), .count = TF_NumInputs(context)};
    for (int i = 0; i < call->count; i++)
        TF_GetInput(context, i, &call->inputs[i], call->status);
    require(call, TF_GetCode(call->status) == TF_OK, "inputs must be readable");
}

static void close_call(struct call *call)
{
    if (TF_GetCode(call->status) != TF_OK)
        TF_OpKernelContext_Failure(call->context, call->status);
    for (int i = 0; i < call->count; i++)
        if (call->inputs[i])
            TF_DeleteTensor(call->inputs[i]);
    for (int i = 0; i < MOST_OUTPUTS; i++)
        if (call->outputs[i])
            TF_DeleteTensor(call->outputs[i]);
    TF_DeleteStatus(call->status);
}

static int channels_of(const TF_Tensor *map) { return (int)TF_Dim(map, 4); }

/* Whether two maps have the same grid and batch. */
static bool same_grid(const TF_Tensor *map, const TF_Tensor *other)
{
    for (int i = 0; i < 4; i++)
        if (TF_NumDims(map) != 5 || TF_NumDims(other) != 5 || TF_Dim(map, i) != TF_Dim(other, i))
            return false;
    return true;
}

/* The values of [batch, rows, channels]; NULL where the tensor is empty. */
static const float *coefficients_of(struct call *call, const TF_Tensor *tensor, int64_t batch, int64_t rows, int64_t channels)
{
    int64_t size = TF_TensorElementCount(tensor);
    require(call, size == 0 || size == batch * rows * channels, "coefficients must be of shape (batch, rows, channels)");
    return size ? TF_TensorData(tensor) : NULL;
}

static struct input input_of(struct call *call, int maps, TF_Tensor **map, TF_Tensor *raw, const TF_Tensor *coefficients)
{
    struct input in = {.form = RAW};
    int channels = 0;
    for (int i = 0; i < maps; i++) {
        require(call, same_grid(map[0], map[i]), "maps must be of shape (batch, x, y, z, channels), with one grid");
        if (call->failed)
            return in;
        in.maps[i] = TF_TensorData(map[i]);
        channels += in.channels[i] = channels_of(map[i]);
        require(call, in.channels[i] > 0 && in.channels[i] <= MOST_CHANNELS, "channels must be 1 to 1024");
    }
    in.coefficients = coefficients_of(call, coefficients, TF_Dim(map[0], 0), COEFFICIENTS, channels);
    if (in.coefficients)
        in.form = raw ? NORM_RELU_GRADIENT : NORM_RELU;
    if (raw) {
        require(call, in.coefficients && maps == 1 && same_grid(map[0], raw) && channels_of(raw) == channels,
                "a gradient of a norm must have one map, its raw map of the same shape, and coefficients");
        in.raw = TF_TensorData(raw);
    }
    return in;
}

/* An operation on maps of this grid. */
static struct operation operation_of(struct call *call, const TF_Tensor *map)
{
    require(call, TF_NumDims(map) == 5 && TF_TensorElementCount(map) > 0, "maps must hold voxels, in 5 dimensions");
    if (call->failed)
        return (struct operation){0};
    for (int i = 0; i < 4; i++)
        require(call, TF_Dim(map, i) < 1 << 24, "sizes of a map must be below 2^24");
    return (struct operation){
        .dtype = TF_TensorType(map) == TF_FLOAT ? FLOAT32 : BFLOAT16,
        .batch = (int)TF_Dim(map, 0), .x = (int)TF_Dim(map, 1), .y = (int)TF_Dim(map, 2), .z = (int)TF_Dim(map, 3),
        .threads = thread_count(),
    };
}

/* Memory for output `index`; of `rank` 0 it is empty. Where `over` is not negative it is that of this input, if nobody else
   has it: its handle goes, as it would count. */
static void *output_of(struct call *call, int index, TF_DataType type, const int64_t *shape, int rank, int over)
{
    if (TF_GetCode(call->status) != TF_OK)
        return NULL;
    int64_t none[] = {0}, count = rank ? 1 : 0;
    for (int i = 0; i < rank; i++)
        count *= shape[i];
    if (!rank)
        shape = none, rank = 1;
    if (over >= 0) {
        int forwarded;
        TF_DeleteTensor(call->inputs[over]);
        call->inputs[over] = NULL;
        call->outputs[index] = TF_ForwardInputOrAllocateOutput(call->context, &over, 1, index, shape, rank, &forwarded, call->status);
    } else {
        size_t bytes = count * TF_DataTypeSize(type);
        call->outputs[index] = TF_AllocateOutput(call->context, index, type, shape, rank, bytes, call->status);
    }
    return TF_GetCode(call->status) == TF_OK ? TF_TensorData(call->outputs[index]) : NULL;
}

static void check_result(struct call *call, int code)
{
    if (code == -1)
        TF_SetStatus(call->status, TF_RESOURCE_EXHAUSTED, "memory must suffice for the rows of every thread");
    else if (code)
        TF_SetStatus(call->status, TF_UNIMPLEMENTED, "the CPU must have AVX2 and FMA");
}

/* --- The kernels --- */

#define LIST(...) (const char *const[]){__VA_ARGS__, NULL}

/* A kernel's attributes, each at least 0 and at most as given. */
static int *create(TF_OpKernelConstruction *construction, const char *const *names, const int *most)
{
    int *attributes = calloc(4, sizeof *attributes);
    TF_Status *status = TF_NewStatus();
    for (int i = 0; names[i] && TF_GetCode(status) == TF_OK; i++) {
        TF_OpKernelConstruction_GetAttrInt32(construction, names[i], &attributes[i], status);
        if (TF_GetCode(status) == TF_OK && (attributes[i] < 0 || attributes[i] > most[i]))
            TF_SetStatus(status, TF_INVALID_ARGUMENT, "kind must be that of a pass; maps, others at most two; above, below at most one");
    }
    if (TF_GetCode(status) != TF_OK)
        TF_OpKernelConstruction_Failure(construction, status);
    TF_DeleteStatus(status);
    return attributes;
}

struct kernel { int maps, above, below, transposed; }; /* how many inputs there are of each */
struct pass_kernel { int kind, others, none[2]; };

static void *create_convolve(TF_OpKernelConstruction *construction)
{
    return create(construction, LIST("n_maps", "n_above", "n_below"), (int[]){2, 1, 1});
}

static void *create_input_gradient(TF_OpKernelConstruction *construction)
{
    struct kernel *kernel = create_convolve(construction);
    kernel->transposed = 1;
    return kernel;
}

static void *create_filter_gradient(TF_OpKernelConstruction *construction)
{
    return create(construction, LIST("n_maps", "n_above"), (int[]){2, 1});
}

static void *create_pass(TF_OpKernelConstruction *construction)
{
    return create(construction, LIST("kind", "n_others"), (int[]){PASS_KINDS - 1, 2});
}

static void compute_convolution(void *state, TF_OpKernelContext *context)
{
    const struct kernel *kernel = state;
    struct call call;
    open_call(&call, context);
    TF_Tensor *filters = call.inputs[0], **maps = call.inputs + 3, **above = maps + kernel->maps, **below = above + kernel->above;
    struct operation op = operation_of(&call, maps[0]);
    require(&call, TF_NumDims(filters) == 5 && TF_Dim(filters, 0) == 3 && TF_Dim(filters, 1) == 3 && TF_Dim(filters, 2) == 3,
            "filters must be of shape (3, 3, 3, in, out)");
    if (call.failed)
        goto done;
    op.input = input_of(&call, kernel->maps, maps, kernel->above ? above[0] : NULL, call.inputs[1]);
    op.filters = TF_TensorData(filters);
    op.transposed = kernel->transposed;
    int in = (int)TF_Dim(filters, kernel->transposed ? 4 : 3), out = (int)TF_Dim(filters, kernel->transposed ? 3 : 4);
    require(&call, in == op.input.channels[0] + op.input.channels[1], "maps must have as many channels as the filters read");
    require(&call, out > 0 && out <= MOST_CHANNELS, "channels must be 1 to 1024");
    op.output = (struct output){.channels = out, .sums = kernel->transposed ? NO_SUMS : MOMENTS};
    if (kernel->below)
        require(&call, same_grid(maps[0], below[0]) && channels_of(below[0]) == out, "the map below must be of the output's shape");
    op.output.adds = kernel->below && !kernel->transposed;
    if (kernel->below && kernel->transposed && !call.failed) {
        op.output.raw = TF_TensorData(below[0]);
        op.output.below = coefficients_of(&call, call.inputs[2], op.batch, BELOW, out);
        require(&call, op.output.below != NULL, "the norm below must have coefficients");
        op.output.sums = NORM_SUMS;
    }
    if (call.failed)
        goto done;
    const void *added = op.output.adds ? TF_TensorData(below[0]) : NULL;
    int over = op.output.adds ? 3 + kernel->maps + kernel->above : op.input.channels[0] == out ? 3 : -1;
    int64_t shape[] = {op.batch, op.x, op.y, op.z, out}, sums_shape[] = {op.batch, 2, out};
    op.output.map = output_of(&call, 0, TF_TensorType(maps[0]), shape, 5, over);
    op.output.sums_to = output_of(&call, 1, TF_FLOAT, sums_shape, 3, -1);
    if (TF_GetCode(call.status) == TF_OK) {
        if (added && added != op.output.map) /* somebody else has it */
            memcpy(op.output.map, added, TF_TensorByteSize(call.outputs[0]));
        for (size_t i = 0; i < (size_t)op.batch * 2 * out; i++)
            op.output.sums_to[i] = 0;
        check_result(&call, native_run(NULL, &op));
    }
done:
    close_call(&call);
}

static void compute_filter_gradient(void *state, TF_OpKernelContext *context)
{
    const struct kernel *kernel = state;
    struct call call;
    open_call(&call, context);
    TF_Tensor **maps = call.inputs + 2, **above = maps + kernel->maps, **gradient = above + kernel->above;
    struct operation op = operation_of(&call, maps[0]);
    if (call.failed)
        goto done;
    require(&call, same_grid(maps[0], gradient[0]), "maps and gradient must have one grid");
    op.input = input_of(&call, kernel->maps, maps, NULL, call.inputs[0]);
    op.gradient = input_of(&call, 1, gradient, kernel->above ? above[0] : NULL, call.inputs[1]);
    if (call.failed)
        goto done;
    int64_t shape[] = {3, 3, 3, op.input.channels[0] + op.input.channels[1], op.gradient.channels[0]};
    op.filter_gradient = output_of(&call, 0, TF_FLOAT, shape, 5, -1);
    if (TF_GetCode(call.status) == TF_OK)
        check_result(&call, native_run(NULL, &op));
done:
    close_call(&call);
}

/* --- Passes --- */

/* What a kind takes and makes. */
static const struct { int pools, others, optional, filters, no_map, sums, filter_gradient, in_place; } ABOUT[PASS_KINDS] = {
    [MAX_POOL] = {.pools = 1},
    [MAX_POOL_GRADIENT] = {.pools = 1, .others = 2, .sums = 1, .in_place = 1},
    [RESIDUAL_SUM] = {.others = 1, .in_place = 1},
    [RESIDUAL_GRADIENT] = {.others = 2, .sums = 1, .in_place = 1},
    [TO_RAW] = {.others = 1, .in_place = 1},
    [PROJECT] = {.optional = 1, .filters = 1, .in_place = 1},
    [PROJECT_GRADIENT] = {.others = 1, .optional = 1, .filters = 1, .sums = 1, .filter_gradient = 1, .in_place = 1},
    [PROJECT_SUMS] = {.others = 1, .filters = 1, .no_map = 1, .sums = 1, .filter_gradient = 1},
    [PROJECT_TO_RAW] = {.others = 1, .filters = 1, .in_place = 1},
    [UP_CONVOLVE] = {.filters = 1},
    [UP_INPUT_GRADIENT] = {.others = 1, .filters = 1, .sums = 1},
    [UP_FILTER_GRADIENT] = {.others = 1, .no_map = 1, .filter_gradient = 1},
};

static bool has_shape(const TF_Tensor *map, const int64_t *shape)
{
    for (int i = 0; i < 5; i++)
        if (TF_NumDims(map) != 5 || TF_Dim(map, i) != shape[i])
            return false;
    return true;
}

static void compute_pass(void *state, TF_OpKernelContext *context)
{
    const struct pass_kernel *kernel = state;
    struct call call;
    open_call(&call, context);
    TF_Tensor **inputs = call.inputs, *filters = inputs[0], *raw = inputs[3];
    int kind = kernel->kind, ups = kind >= UP_CONVOLVE, to_raw = kind == TO_RAW || kind == PROJECT_TO_RAW, coarser = ABOUT[kind].pools ? 2 : 1, last = 3 + kernel->others;
    require(&call, TF_NumDims(raw) == 5 && TF_TensorElementCount(raw) > 0, "maps must hold voxels, in 5 dimensions");
    require(&call, kernel->others >= ABOUT[kind].others && kernel->others <= ABOUT[kind].others + ABOUT[kind].optional, "others must be as many as the kind takes");
    for (int i = 1; i < 4 && !call.failed; i++)
        require(&call, TF_Dim(raw, i) % coarser == 0 && TF_Dim(raw, i) < 1 << 24, "sizes of a map must be even where it is pooled, and below 2^24");
    if (call.failed)
        goto done;
    int channels = channels_of(raw), wide = channels;
    if (ABOUT[kind].filters) {
        require(&call, TF_NumDims(filters) == 5 && TF_Dim(filters, ups ? 4 : 3) == channels && TF_Dim(filters, 0) == (ups ? 2 : 1), "filters must fit the map");
        wide = call.failed ? 1 : (int)TF_Dim(filters, ups ? 3 : 4);
    } else if (kernel->others) {
        wide = TF_NumDims(inputs[4]) == 5 ? channels_of(inputs[4]) : 1;
    }
    int64_t whole[] = {TF_Dim(raw, 0), TF_Dim(raw, 1), TF_Dim(raw, 2), TF_Dim(raw, 3), channels}, fine[5], coarse[5], made[5];
    for (int i = 0; i < 5; i++) {
        bool grid = i >= 1 && i <= 3;
        coarse[i] = grid ? whole[i] / coarser : whole[i];
        fine[i] = i == 4 ? wide : grid && ups ? 2 * whole[i] : whole[i];
        made[i] = kind == PROJECT || kind == UP_CONVOLVE ? fine[i] : kind == MAX_POOL ? coarse[i] : whole[i];
    }
    for (int i = 0; i < kernel->others; i++) {
        const int64_t *first = kind == MAX_POOL_GRADIENT ? coarse : kind < PROJECT ? whole : fine;
        require(&call, has_shape(inputs[4 + i], i == 0 ? first : whole), "other maps must be of the shape that the kind takes");
    }
    require(&call, kind != PROJECT || TF_TensorElementCount(inputs[1]) == wide, "bias must have a value for each output");
    struct pass pass = {
        .kind = kind, .dtype = TF_TensorType(raw) == TF_FLOAT ? FLOAT32 : BFLOAT16, .threads = thread_count(),
        .batch = (int)coarse[0], .x = (int)coarse[1], .y = (int)coarse[2], .z = (int)coarse[3], .channels = channels, .outputs = wide,
        .raw = TF_TensorData(raw), .filters = ABOUT[kind].filters ? TF_TensorData(filters) : NULL, .bias = TF_TensorData(inputs[1]),
        .coefficients = coefficients_of(&call, inputs[2], whole[0], to_raw ? COEFFICIENTS : BELOW, channels),
    };
    if (call.failed)
        goto done;
    for (int i = 0; i < kernel->others; i++)
        pass.others[i] = TF_TensorData(inputs[4 + i]);
    int64_t sums[] = {whole[0], 2, channels}, of_up[] = {2, 2, 2, wide, channels}, of_project[] = {1, 1, 1, channels, wide}, bias[] = {wide};
    bool projects = kind == PROJECT_GRADIENT || kind == PROJECT_SUMS;
    int over = to_raw ? 3 : last;
    bool in_place = ABOUT[kind].in_place && has_shape(inputs[over], made) && last > 3 && (kind != PROJECT_GRADIENT || kernel->others == 2);
    pass.map = output_of(&call, 0, TF_TensorType(raw), made, ABOUT[kind].no_map ? 0 : 5, in_place ? over : -1);
    float *to_sums = output_of(&call, 1, TF_FLOAT, sums, ABOUT[kind].sums ? 3 : 0, -1);
    float *to_filters = output_of(&call, 2, TF_FLOAT, ups ? of_up : of_project, ABOUT[kind].filter_gradient ? 5 : 0, -1);
    float *to_bias = output_of(&call, 3, TF_FLOAT, bias, projects ? 1 : 0, -1);
    if (TF_GetCode(call.status) == TF_OK) {
        pass.map = ABOUT[kind].no_map ? NULL : pass.map;
        pass.sums_to = ABOUT[kind].sums ? to_sums : NULL;
        pass.filter_gradient = ABOUT[kind].filter_gradient ? to_filters : NULL;
        pass.bias_gradient = projects ? to_bias : NULL;
        check_result(&call, native_pass(NULL, &pass));
    }
done:
    close_call(&call);
}

/* --- Registration, when the library is loaded --- */

static void destroy(void *kernel) { free(kernel); }

/* operations.py knows the shapes. */
static void shape_unknown(TF_ShapeInferenceContext *context, TF_Status *status)
{
    TF_ShapeInferenceContextSetUnknownShape(context, status);
}

static void add_operation(const char *name, const char *const *attributes, const char *const *inputs, const char *const *outputs,
                          void *(*create_kernel)(TF_OpKernelConstruction *), void (*compute)(void *, TF_OpKernelContext *))
{
    TF_Status *status = TF_NewStatus();
    TF_OpDefinitionBuilder *definition = TF_NewOpDefinitionBuilder(name);
    for (; *attributes; attributes++)
        TF_OpDefinitionBuilderAddAttr(definition, *attributes);
    for (; *inputs; inputs++)
        TF_OpDefinitionBuilderAddInput(definition, *inputs);
    for (; *outputs; outputs++)
        TF_OpDefinitionBuilderAddOutput(definition, *outputs);
    TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, shape_unknown);
    TF_RegisterOpDefinition(definition, status);
    if (TF_GetCode(status) == TF_OK)
        TF_RegisterKernelBuilder(name, TF_NewKernelBuilder(name, "CPU", create_kernel, compute, destroy), status);
    if (TF_GetCode(status) != TF_OK)
        fprintf(stderr, "%s is not registered: %s\n", name, TF_Message(status));
    TF_DeleteStatus(status);
}

__attribute__((constructor)) static void register_operations(void)
{
    const char *const *attributes = LIST("T: {float, bfloat16}", "n_maps: int >= 1", "n_above: int >= 0", "n_below: int >= 0");
    const char *const *inputs = LIST("filters: float", "coefficients: float", "below_coefficients: float", "maps: n_maps * T",
                                     "above: n_above * T", "below: n_below * T");
    const char *const *outputs = LIST("map: T", "sums: float");
    add_operation("CpuConvolve", attributes, inputs, outputs, create_convolve, compute_convolution);
    add_operation("CpuInputGradient", attributes, inputs, outputs, create_input_gradient, compute_convolution);
    add_operation("CpuFilterGradient", LIST("T: {float, bfloat16}", "n_maps: int >= 1", "n_above: int >= 0"),
                  LIST("coefficients: float", "gradient_coefficients: float", "maps: n_maps * T", "above: n_above * T", "gradient: T"),
                  LIST("filter_gradient: float"), create_filter_gradient, compute_filter_gradient);
    add_operation("CpuPass", LIST("T: {float, bfloat16}", "kind: int", "n_others: int >= 0"),
                  LIST("filters: float", "bias: float", "coefficients: float", "raw: T", "others: n_others * T"),
                  LIST("map: T", "sums: float", "filter_gradient: float", "bias_gradient: float"), create_pass, compute_pass);
}
