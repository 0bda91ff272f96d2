/* What door.c takes of TensorFlow's C interface, the same from 2.15 to 2.21, so that no TensorFlow is needed to build:
   tensorflow/c/kernels.h, ops.h, tf_tensor.h, tf_status.h and tf_datatype.h. */
#ifndef TENSORFLOW_H
#define TENSORFLOW_H
#include <stddef.h>
#include <stdint.h>

typedef enum { TF_FLOAT = 1, TF_BFLOAT16 = 14 } TF_DataType;
typedef enum { TF_OK = 0, TF_INVALID_ARGUMENT = 3, TF_RESOURCE_EXHAUSTED = 8, TF_UNIMPLEMENTED = 12 } TF_Code;
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
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder *, void (*)(TF_ShapeInferenceContext *, TF_Status *));
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext *, TF_Status *);
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder *, TF_Status *);

TF_KernelBuilder *TF_NewKernelBuilder(const char *operation, const char *device, void *(*create)(TF_OpKernelConstruction *),
                                      void (*compute)(void *, TF_OpKernelContext *), void (*destroy)(void *));
void TF_RegisterKernelBuilder(const char *name, TF_KernelBuilder *, TF_Status *);
void TF_OpKernelConstruction_GetAttrInt32(TF_OpKernelConstruction *, const char *name, int32_t *value, TF_Status *);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction *, TF_Status *);
int TF_NumInputs(TF_OpKernelContext *);
void TF_GetInput(TF_OpKernelContext *, int index, TF_Tensor **, TF_Status *);
TF_Tensor *TF_AllocateOutput(TF_OpKernelContext *, int index, TF_DataType, const int64_t *shape, int rank, size_t bytes,
                             TF_Status *);
TF_Tensor *TF_ForwardInputOrAllocateOutput(TF_OpKernelContext *, const int *inputs, int count, int index, const int64_t *shape,
                                           int rank, int *forwarded, TF_Status *);
void TF_OpKernelContext_Failure(TF_OpKernelContext *, TF_Status *);
#endif
