/* The way into TensorFlow: its C kernel API alone. Built once, it runs in TensorFlow 2.15 to 2.21.

   CpuOperation  filters, bias, coefficients, other_coefficients: float; maps: n_maps * T; others:
   n_others * T
                 -> map: T; sums, filter_gradient, bias_gradient: float
   CpuLossSums   logits: T; target: uint8 -> sums: float CpuLossSlope  logits: T; target: uint8;
   factors: float -> slope: T CpuOrthogonal kernel: float -> orthogonal: float

   The first is of each kind in native.h but those of a loss and ORTHOGONAL. Between two grids its
   `strides` are voxels of the finer one for one of the coarser. What a kind neither takes nor makes
   is empty; every other shape follows from the first map's and the filters', and is compared with
   them before any memory is read. */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "native.h"

int native_run(const char *name, const struct operation *operation);

/* --- Of TensorFlow's C interface, the same from 2.15 to 2.21, so that no TensorFlow is needed to
   build: tensorflow/c/kernels.h, ops.h, tf_tensor.h, tf_status.h and tf_datatype.h --- */

typedef enum { TF_FLOAT = 1, TF_UINT8 = 4, TF_BFLOAT16 = 14 } TF_DataType;
typedef enum {
    TF_OK = 0,
    TF_INVALID_ARGUMENT = 3,
    TF_RESOURCE_EXHAUSTED = 8,
    TF_UNIMPLEMENTED = 12
} TF_Code;
typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;

TF_Status *TF_NewStatus(void);
void TF_DeleteStatus(TF_Status *);
void TF_SetStatus(TF_Status *, TF_Code, const char *message);
TF_Code TF_GetCode(const TF_Status *);
const char *TF_Message(const TF_Status *);

void TF_DeleteTensor(TF_Tensor *);
TF_DataType TF_TensorType(const TF_Tensor *);
int TF_NumDims(const TF_Tensor *);
int64_t TF_Dim(const TF_Tensor *, int dimension);
int64_t TF_TensorElementCount(const TF_Tensor *);
void *TF_TensorData(const TF_Tensor *);

TF_OpDefinitionBuilder *TF_NewOpDefinitionBuilder(const char *name);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder *, const char *);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder *, const char *);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder *, const char *);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder *,
                                                     void (*)(TF_ShapeInferenceContext *,
                                                              TF_Status *));
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext *, TF_Status *);
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder *, TF_Status *);

TF_KernelBuilder *TF_NewKernelBuilder(const char *operation, const char *device,
                                      void *(*create)(TF_OpKernelConstruction *),
                                      void (*compute)(void *, TF_OpKernelContext *),
                                      void (*destroy)(void *));
void TF_RegisterKernelBuilder(const char *name, TF_KernelBuilder *, TF_Status *);
void TF_OpKernelConstruction_GetAttrInt32(TF_OpKernelConstruction *, const char *name,
                                          int32_t *value, TF_Status *);
void TF_OpKernelConstruction_GetAttrInt32List(TF_OpKernelConstruction *, const char *name,
                                              int32_t *values, int most, TF_Status *);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction *, TF_Status *);
int TF_NumInputs(TF_OpKernelContext *);
void TF_GetInput(TF_OpKernelContext *, int index, TF_Tensor **, TF_Status *);
TF_Tensor *TF_AllocateOutput(TF_OpKernelContext *, int index, TF_DataType, const int64_t *shape,
                             int rank, size_t bytes, TF_Status *);
TF_Tensor *TF_ForwardInputOrAllocateOutput(TF_OpKernelContext *, const int *inputs, int count,
                                           int index, const int64_t *shape, int rank,
                                           int *forwarded, TF_Status *);
void TF_OpKernelContext_Failure(TF_OpKernelContext *, TF_Status *);

/* --- A call: its tensors, their shapes, and the first rule that they break --- */

enum { FILTERS, BIAS, NORMS, OTHER_NORMS, MAPS, MOST_INPUTS = MAPS + 4, OUTPUTS = 4 };
enum { MOST_CHANNELS = 1 << 14 }; /* of a map, as models/config.py has it */

struct call {
    TF_OpKernelContext *context;
    TF_Status *status;
    TF_Tensor *inputs[MOST_INPUTS + OUTPUTS], **outputs; /* these follow all that may be inputs */
    int count;
};

struct shape {
    int64_t rank, size[5];
};
static const struct shape EMPTY = {1, {0}};

static bool fine(const struct call *call) { return TF_GetCode(call->status) == TF_OK; }

/* `holds` or a message: the rule and what was got, as of printf. */
#define REQUIRE(call, holds, ...) \
    do \
        if (fine(call) && !(holds)) { \
            char message[384]; \
            snprintf(message, sizeof message, __VA_ARGS__); \
            TF_SetStatus((call)->status, TF_INVALID_ARGUMENT, message); \
        } \
    while (0)

static struct shape shape_of(const TF_Tensor *tensor)
{
    struct shape shape = {.rank = TF_NumDims(tensor)};
    for (int i = 0; i < shape.rank && i < 5; i++)
        shape.size[i] = TF_Dim(tensor, i);
    return shape;
}

static bool same(struct shape one, struct shape other) { return !memcmp(&one, &other, sizeof one); }

static struct text {
    char of[128];
} text_of(struct shape shape)
{
    struct text text = {{0}};
    char *to = text.of;
    for (int i = 0; i < shape.rank && i < 5; i++)
        to += sprintf(to, i ? ", %lld" : "%lld", (long long)shape.size[i]);
    return text;
}

/* The values of an input, which must be of this shape; NULL of one that is not taken. */
static void *values_of(struct call *call, int input, bool taken, const char *name,
                       struct shape shape)
{
    if (!taken)
        return NULL;
    struct shape found = shape_of(call->inputs[input]);
    REQUIRE(call, same(found, shape), "%s must be of shape (%s), got (%s)", name, text_of(shape).of,
            text_of(found).of);
    return TF_TensorData(call->inputs[input]);
}

/* Memory for an output, or NULL if it is empty: the memory of input `over`, if that is not negative
   and has no other user. The input's handle is given back first, as it would count as one. */
static void *output_of(struct call *call, int index, TF_DataType type, struct shape shape, int over)
{
    int64_t count = 1;
    for (int i = 0; i < shape.rank; i++)
        count *= shape.size[i];
    if (!fine(call)) {
        return NULL;
    } else if (over >= 0) {
        int forwarded;
        TF_DeleteTensor(call->inputs[over]);
        call->inputs[over] = NULL;
        call->outputs[index] = TF_ForwardInputOrAllocateOutput(
            call->context, &over, 1, index, shape.size, shape.rank, &forwarded, call->status);
    } else {
        size_t bytes = count * (type == TF_FLOAT ? sizeof(float) : 2);
        call->outputs[index] = TF_AllocateOutput(call->context, index, type, shape.size, shape.rank,
                                                 bytes, call->status);
    }
    if (!fine(call) || !count)
        return NULL;
    void *values = TF_TensorData(call->outputs[index]);
    if (over < 0)
        use_huge_pages(values, count * (type == TF_FLOAT ? sizeof(float) : 2));
    return values;
}

/* --- The kernel --- */

/* What a kind takes and makes. */
enum grid { SAME_GRID, FINER, COARSER };
enum makes { NO_MAP, LIKE_MAP, LIKE_OTHER };
enum over { NOWHERE, OVER_MAP, OVER_OTHER, OVER_SECOND_OTHER };
struct about {
    char more;                                 /* maps than one that may be joined */
    char others;                               /* at least */
    char optional;                             /* others */
    char edge;                                 /* of the filters; on a finer grid the strides */
    char filters;                              /* whether they come in */
    char swapped;                              /* whether their order is [outputs][channels] */
    char grid;                                 /* of the other map */
    char makes;                                /* a map like which one */
    char over;                                 /* which map it may be written over */
    char sums, filter_gradient, bias_gradient; /* whether they are made */
};
/* clang-format off */
static const struct about ABOUT[LOSS_SUMS] = {
    [CONVOLVE] = {.more = 1, .optional = 1, .edge = 3, .filters = 1,
                  .makes = LIKE_OTHER, .over = OVER_MAP, .sums = 1},
    [INPUT_GRADIENT] = {.edge = 3, .filters = 1, .swapped = 1,
                        .makes = LIKE_OTHER, .over = OVER_MAP, .sums = 1},
    [FILTER_GRADIENT] = {.more = 1, .others = 1, .edge = 3, .filter_gradient = 1},
    [MAX_POOL] = {.grid = COARSER, .makes = LIKE_OTHER},
    [MAX_POOL_GRADIENT] = {.others = 2, .grid = COARSER,
                           .makes = LIKE_MAP, .over = OVER_SECOND_OTHER, .sums = 1},
    [RESIDUAL_SUM] = {.others = 1, .makes = LIKE_MAP, .over = OVER_OTHER},
    [RESIDUAL_GRADIENT] = {.others = 2, .makes = LIKE_MAP, .over = OVER_SECOND_OTHER, .sums = 1},
    [TO_RAW] = {.others = 1, .makes = LIKE_MAP, .over = OVER_MAP},
    [PROJECT] = {.optional = 1, .edge = 1, .filters = 1, .makes = LIKE_OTHER, .over = OVER_OTHER},
    [PROJECT_GRADIENT] = {.others = 1, .optional = 1, .edge = 1, .filters = 1,
                          .makes = LIKE_MAP, .over = OVER_SECOND_OTHER, .sums = 1,
                          .filter_gradient = 1, .bias_gradient = 1},
    [PROJECT_SUMS] = {.others = 1, .edge = 1, .filters = 1, .sums = 1,
                      .filter_gradient = 1, .bias_gradient = 1},
    [PROJECT_TO_RAW] = {.others = 1, .edge = 1, .filters = 1, .makes = LIKE_MAP, .over = OVER_MAP},
    [UP_CONVOLVE] = {.filters = 1, .swapped = 1, .grid = FINER, .makes = LIKE_OTHER},
    [UP_INPUT_GRADIENT] = {.others = 1, .filters = 1, .swapped = 1, .grid = FINER,
                           .makes = LIKE_MAP, .sums = 1},
    [UP_FILTER_GRADIENT] = {.others = 1, .swapped = 1, .grid = FINER, .filter_gradient = 1},
};
/* clang-format on */

struct attributes {
    int kind, maps, others;
    int strides[3];
};

/* The operation itself, once its tensors are known to fit. */
static void run(struct call *call, const struct operation *op)
{
    if (!fine(call))
        return;
    int code = native_run(NULL, op);
    if (code == -1)
        TF_SetStatus(call->status, TF_RESOURCE_EXHAUSTED,
                     "memory must suffice for the rows of every thread");
    else if (code)
        TF_SetStatus(call->status, TF_UNIMPLEMENTED, "the CPU must have AVX2 and FMA");
}

static void set_grid(struct operation *op, const struct shape *map)
{
    op->batch = (int)map->size[0];
    op->x = (int)map->size[1];
    op->y = (int)map->size[2];
    op->z = (int)map->size[3];
}

/* Raw maps of norms, that come before or after the others of a kind. */
static int raw_maps_of(int kind, bool normed, bool other_normed)
{
    if (kind == INPUT_GRADIENT)
        return normed + other_normed;
    return kind == FILTER_GRADIENT ? other_normed : 0;
}

static void require_counts(struct call *call, const struct attributes *given, int raw_maps)
{
    const struct about *about = &ABOUT[given->kind];
    int fewest = about->others + raw_maps;
    int most = fewest + about->optional;
    REQUIRE(call, given->maps <= 1 + about->more, "maps must be at most %d, got %d",
            1 + about->more, given->maps);
    REQUIRE(call, fewest <= given->others && given->others <= most,
            "others must be %d to %d, got %d", fewest, most, given->others);
}

static void require_map(struct call *call, const struct attributes *given, struct shape map)
{
    const struct about *about = &ABOUT[given->kind];
    REQUIRE(call, map.rank == 5 && TF_TensorElementCount(call->inputs[MAPS]) > 0,
            "map must hold voxels in 5 dimensions, got (%s) in %d", text_of(map).of, (int)map.rank);
    const int *strides = given->strides;
    for (int i = 0; i < 3; i++)
        REQUIRE(call, strides[i] == 1 || strides[i] == 2, "strides must be 1 or 2, got %d, %d, %d",
                strides[0], strides[1], strides[2]);
    for (int i = 0; i < 4; i++) {
        bool is_pooled = about->grid == COARSER && i > 0 && strides[i - 1] == 2;
        bool fits = map.size[i] < 1 << 24 && !(is_pooled && map.size[i] % 2);
        REQUIRE(call, fits,
                "sizes of a map must be below 2^24, and even where it is pooled, got (%s)",
                text_of(map).of);
    }
}

/* Takes the maps; returns the channels of all. */
static int64_t take_maps(struct call *call, struct operation *op, int count, struct shape map)
{
    int64_t channels = 0;
    for (int i = 0; i < count; i++) {
        struct shape part = map;
        part.size[4] = shape_of(call->inputs[MAPS + i]).size[4];
        op->maps[i] = values_of(call, MAPS + i, true, "map", part);
        op->channels[i] = (int)part.size[4];
        channels += part.size[4];
        REQUIRE(call, part.size[4] > 0 && part.size[4] <= MOST_CHANNELS,
                "channels must be 1 to %d, got %lld", MOST_CHANNELS, (long long)part.size[4]);
    }
    return channels;
}

/* Channels of the filters' output, or of what has the size of it. */
static int64_t outputs_of(struct call *call, const struct attributes *given, int64_t channels)
{
    const struct about *about = &ABOUT[given->kind];
    int64_t outputs = channels;
    if (about->filters)
        outputs = shape_of(call->inputs[FILTERS]).size[about->swapped ? 3 : 4];
    else if (about->filter_gradient)
        outputs = shape_of(call->inputs[MAPS + given->maps]).size[4];
    REQUIRE(call, outputs > 0 && outputs <= MOST_CHANNELS, "outputs must be 1 to %d, got %lld",
            MOST_CHANNELS, (long long)outputs);
    return outputs;
}

static struct shape filters_of(const struct attributes *given, int64_t channels, int64_t outputs)
{
    const struct about *about = &ABOUT[given->kind];
    struct shape filters = {.rank = 5};
    for (int i = 0; i < 3; i++)
        filters.size[i] = about->grid == FINER ? given->strides[i] : about->edge;
    filters.size[3] = about->swapped ? outputs : channels;
    filters.size[4] = about->swapped ? channels : outputs;
    return filters;
}

/* The shape of the other map. */
static struct shape other_of(const struct attributes *given, struct shape map, int64_t outputs)
{
    int grid = ABOUT[given->kind].grid;
    struct shape other = map;
    for (int i = 1; i < 4; i++) {
        if (grid == FINER)
            other.size[i] = given->strides[i - 1] * map.size[i];
        if (grid == COARSER)
            other.size[i] = map.size[i] / given->strides[i - 1];
    }
    other.size[4] = outputs;
    return other;
}

/* The input over which the map may be written; -1 if there is none of its shape. */
static int input_over(struct call *call, const struct attributes *given, struct shape made)
{
    int first_other = MAPS + given->maps;
    int input = -1;
    switch (ABOUT[given->kind].over) {
    case OVER_MAP:
        input = MAPS;
        break;
    case OVER_OTHER:
        input = first_other;
        break;
    case OVER_SECOND_OTHER:
        input = first_other + 1;
        break;
    }
    if (given->kind == CONVOLVE && given->others) /* over what is added */
        input = first_other;
    if (input < 0 || input >= call->count || !same(shape_of(call->inputs[input]), made))
        return -1;
    return input;
}

static void compute_kind(struct call *call, const struct attributes *given)
{
    int kind = given->kind;
    REQUIRE(call, kind < LOSS_SUMS, "kind must be below %d, got %d", LOSS_SUMS, kind);
    if (!fine(call))
        return;
    const struct about *about = &ABOUT[kind];
    TF_Tensor **inputs = call->inputs;
    int dtype = TF_TensorType(inputs[MAPS]);
    bool normed = TF_TensorElementCount(inputs[NORMS]);
    bool other_normed = TF_TensorElementCount(inputs[OTHER_NORMS]);
    int raw_maps = raw_maps_of(kind, normed, other_normed);
    struct shape map = shape_of(inputs[MAPS]);
    require_counts(call, given, raw_maps);
    require_map(call, given, map);
    if (!fine(call))
        return;

    struct operation op = {.kind = kind, .threads = thread_count()};
    op.dtype = dtype == TF_FLOAT ? FLOAT32 : BFLOAT16;
    int64_t channels = take_maps(call, &op, given->maps, map);
    int64_t outputs = outputs_of(call, given, channels);
    op.outputs = (int)outputs;
    memcpy(op.finer, given->strides, sizeof op.finer);
    struct shape other = other_of(given, map, outputs);
    struct shape filters = filters_of(given, channels, outputs);
    for (int i = 0; i < given->others; i++) {
        int place = i;
        if (kind == INPUT_GRADIENT && !other_normed)
            place++; /* no raw map below */
        bool like_map = place == 1 && kind != FILTER_GRADIENT;
        op.others[place] =
            values_of(call, MAPS + given->maps + i, true, "other map", like_map ? map : other);
    }
    set_grid(&op, about->grid == COARSER ? &other : &map);
    struct shape norms = {3, {map.size[0], COEFFICIENTS, channels}};
    struct shape other_norms = {3, {map.size[0], COEFFICIENTS, outputs}};
    struct shape bias = {1, {outputs}};
    op.coefficients = values_of(call, NORMS, normed, "coefficients", norms);
    op.other_coefficients =
        values_of(call, OTHER_NORMS, other_normed && raw_maps, "other coefficients", other_norms);
    op.filters = values_of(call, FILTERS, about->filters, "filters", filters);
    op.bias = values_of(call, BIAS, kind == PROJECT, "bias", bias);

    struct shape made = EMPTY;
    struct shape sums = {3, {map.size[0], 2, channels}};
    if (about->makes == LIKE_MAP)
        made = map;
    if (about->makes == LIKE_OTHER) {
        made = other;
        sums.size[2] = outputs;
    }
    op.map = output_of(call, 0, dtype, made, input_over(call, given, made));
    op.sums_to = output_of(call, 1, TF_FLOAT, about->sums ? sums : EMPTY, -1);
    op.filter_gradient = output_of(call, 2, TF_FLOAT, about->filter_gradient ? filters : EMPTY, -1);
    op.bias_gradient = output_of(call, 3, TF_FLOAT, about->bias_gradient ? bias : EMPTY, -1);
    run(call, &op);
}

/* A loss of logits, whose gradient may be written over them. */
static void compute_loss(struct call *call, int kind)
{
    enum { LOGITS, TARGET, LOSS_FACTORS };
    TF_Tensor **inputs = call->inputs;
    struct shape map = shape_of(inputs[LOGITS]);
    struct shape target = shape_of(inputs[TARGET]);
    bool fits = map.rank == 5 && target.rank == 5 && TF_TensorElementCount(inputs[LOGITS]) > 0;
    struct operation op = {.kind = kind, .threads = thread_count()};
    op.dtype = TF_TensorType(inputs[LOGITS]) == TF_FLOAT ? FLOAT32 : BFLOAT16;
    for (int i = 0; i < 5 && fits; i++) {
        int64_t finer = target.size[i] / map.size[i];
        fits = finer > 0 && target.size[i] == finer * map.size[i] && target.size[i] < 1 << 24;
        if (i >= 1 && i <= 3)
            op.finer[i - 1] = (int)finer;
        else
            fits = fits && finer == 1;
    }
    REQUIRE(call, fits,
            "target must have the shape of the logits or a finer grid, got (%s) for (%s)",
            text_of(target).of, text_of(map).of);
    REQUIRE(call, map.size[4] <= MOST_CHANNELS && map.size[3] * map.size[4] < 1 << 30,
            "regions must be 1 to %d, and values of a row fewer than 2^30, got logits (%s)",
            MOST_CHANNELS, text_of(map).of);
    struct shape factors = {3, {map.size[0], FACTORS, map.size[4]}};
    struct shape sums = {3, {map.size[0], LOSS_TERMS, map.size[4]}};
    op.coefficients = values_of(call, LOSS_FACTORS, kind == LOSS_SLOPE, "factors", factors);
    if (!fine(call))
        return;
    set_grid(&op, &map);
    op.channels[0] = (int)map.size[4];
    op.maps[0] = TF_TensorData(inputs[LOGITS]);
    op.others[0] = TF_TensorData(inputs[TARGET]);
    if (kind == LOSS_SLOPE)
        op.map = output_of(call, 0, TF_TensorType(inputs[LOGITS]), map, LOGITS);
    else
        op.sums_to = output_of(call, 0, TF_FLOAT, sums, -1);
    run(call, &op);
}

/* A kernel as a matrix whose columns are its outputs; the result may be written over it. */
static void compute_orthogonal_of(struct call *call)
{
    struct shape kernel = shape_of(call->inputs[0]);
    int64_t count = TF_TensorElementCount(call->inputs[0]);
    bool fits = kernel.rank >= 2 && kernel.rank <= 5 && count > 0;
    int64_t columns = fits ? kernel.size[kernel.rank - 1] : 1;
    fits = fits && count / columns < 1 << 30 && columns <= MOST_CHANNELS;
    REQUIRE(call, fits,
            "kernel must hold values in 2 to 5 dimensions, of at most %d outputs, got (%s)",
            MOST_CHANNELS, text_of(kernel).of);
    if (!fine(call))
        return;
    struct operation op = {.kind = ORTHOGONAL,
                           .dtype = FLOAT32,
                           .threads = thread_count(),
                           .batch = 1,
                           .y = 1,
                           .z = 1};
    op.x = (int)(count / columns);
    op.outputs = (int)columns;
    op.maps[0] = TF_TensorData(call->inputs[0]);
    op.map = output_of(call, 0, TF_FLOAT, kernel, 0);
    run(call, &op);
}

/* A call from its tensors to its status; a kind of a loss, or ORTHOGONAL, or the attributes of
   another operation. */
static void compute_call(TF_OpKernelContext *context, int kind, const struct attributes *given)
{
    struct call call = {
        .context = context, .status = TF_NewStatus(), .count = TF_NumInputs(context)};
    call.outputs = call.inputs + MOST_INPUTS;
    REQUIRE(&call, call.count <= MOST_INPUTS, "maps and others must be at most 4, got %d",
            call.count - MAPS);
    for (int i = 0; i < call.count && fine(&call); i++)
        TF_GetInput(context, i, &call.inputs[i], call.status);
    if (fine(&call) && given)
        compute_kind(&call, given);
    else if (fine(&call) && kind == ORTHOGONAL)
        compute_orthogonal_of(&call);
    else if (fine(&call))
        compute_loss(&call, kind);
    if (!fine(&call))
        TF_OpKernelContext_Failure(context, call.status);
    for (int i = 0; i < MOST_INPUTS + OUTPUTS; i++)
        if (call.inputs[i])
            TF_DeleteTensor(call.inputs[i]);
    TF_DeleteStatus(call.status);
}

static void compute(void *attributes, TF_OpKernelContext *context)
{
    compute_call(context, KINDS, attributes);
}
static void compute_sums(void *none, TF_OpKernelContext *context)
{
    compute_call(context, LOSS_SUMS, NULL);
}
static void compute_slope(void *none, TF_OpKernelContext *context)
{
    compute_call(context, LOSS_SLOPE, NULL);
}
static void compute_orthogonal(void *none, TF_OpKernelContext *context)
{
    compute_call(context, ORTHOGONAL, NULL);
}

static void *create(TF_OpKernelConstruction *construction)
{
    struct attributes *given = calloc(1, sizeof *given);
    TF_Status *status = TF_NewStatus();
    const struct {
        const char *name;
        int *to;
    } each[] = {
        {"kind", &given->kind},
        {"n_maps", &given->maps},
        {"n_others", &given->others},
    };
    for (int i = 0; i < 3 && TF_GetCode(status) == TF_OK; i++)
        TF_OpKernelConstruction_GetAttrInt32(construction, each[i].name, each[i].to, status);
    if (TF_GetCode(status) == TF_OK) /* a list of another length leaves zeros, or is cut */
        TF_OpKernelConstruction_GetAttrInt32List(construction, "strides", given->strides, 3,
                                                 status);
    if (TF_GetCode(status) != TF_OK)
        TF_OpKernelConstruction_Failure(construction, status);
    TF_DeleteStatus(status);
    return given;
}

/* operations.py knows the shapes. */
static void shape_unknown(TF_ShapeInferenceContext *context, TF_Status *status)
{
    TF_ShapeInferenceContextSetUnknownShape(context, status);
}

/* An operation of TensorFlow: its name, kernel, and what it takes and makes, in lists that end with
   NULL. */
struct definition {
    const char *name;
    void *(*create)(TF_OpKernelConstruction *);
    void (*compute)(void *, TF_OpKernelContext *);
    void (*destroy)(void *);
    const char *attributes[6], *inputs[7], *outputs[5];
};

static const struct definition DEFINITIONS[] = {
    {
        .name = "CpuOperation",
        .create = create,
        .compute = compute,
        .destroy = free,
        .attributes = {"T: {float, bfloat16}", "kind: int >= 0", "n_maps: int >= 1",
                       "n_others: int >= 0", "strides: list(int) >= 3 = [2, 2, 2]"},
        .inputs = {"filters: float", "bias: float", "coefficients: float",
                   "other_coefficients: float", "maps: n_maps * T", "others: n_others * T"},
        .outputs = {"map: T", "sums: float", "filter_gradient: float", "bias_gradient: float"},
    },
    {
        .name = "CpuLossSums",
        .compute = compute_sums,
        .attributes = {"T: {float, bfloat16}"},
        .inputs = {"logits: T", "target: uint8"},
        .outputs = {"sums: float"},
    },
    {
        .name = "CpuLossSlope",
        .compute = compute_slope,
        .attributes = {"T: {float, bfloat16}"},
        .inputs = {"logits: T", "target: uint8", "factors: float"},
        .outputs = {"slope: T"},
    },
    {
        .name = "CpuOrthogonal",
        .compute = compute_orthogonal,
        .inputs = {"kernel: float"},
        .outputs = {"orthogonal: float"},
    },
};

static void register_definition(const struct definition *about, TF_Status *status)
{
    TF_OpDefinitionBuilder *definition = TF_NewOpDefinitionBuilder(about->name);
    for (const char *const *each = about->attributes; *each; each++)
        TF_OpDefinitionBuilderAddAttr(definition, *each);
    for (const char *const *each = about->inputs; *each; each++)
        TF_OpDefinitionBuilderAddInput(definition, *each);
    for (const char *const *each = about->outputs; *each; each++)
        TF_OpDefinitionBuilderAddOutput(definition, *each);
    TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, shape_unknown);
    TF_RegisterOpDefinition(definition, status);
    if (TF_GetCode(status) != TF_OK)
        return;
    TF_KernelBuilder *kernel =
        TF_NewKernelBuilder(about->name, "CPU", about->create, about->compute, about->destroy);
    TF_RegisterKernelBuilder(about->name, kernel, status);
}

/* When the library is loaded. */
__attribute__((constructor)) static void register_operations(void)
{
    TF_Status *status = TF_NewStatus();
    for (size_t i = 0; i < sizeof DEFINITIONS / sizeof *DEFINITIONS && TF_GetCode(status) == TF_OK;
         i++) {
        register_definition(&DEFINITIONS[i], status);
        if (TF_GetCode(status) != TF_OK)
            fprintf(stderr, "%s is not registered: %s\n", DEFINITIONS[i].name, TF_Message(status));
    }
    TF_DeleteStatus(status);
}
