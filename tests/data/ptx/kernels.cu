// Kernels with their truth: `//! name: parameter=mode … | features`. A pointer that is not listed is untouched.
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <mma.h>
#include <cstdio>
struct Pair { float* out; const float* in; int n; long stride; };
struct Table { float* p[8]; int n; };
struct Node { Node* next; float value; };
__device__ float g_buffer[64];
__constant__ float c_table[64];
typedef void (*Callback)(float*, int);
__noinline__ __device__ void twice(float* o, const float* i, int k) { o[k] = i[k] * 2; }
__noinline__ __device__ float* pick(float* a, float* b, int k) { return k ? a : b; }
__noinline__ __device__ int depth(float* a, int k) { return k <= 0 ? 0 : (a[k] = k, 1 + depth(a, k - 1)); }
extern "C" {
//! axpy: 0=RW 1=R | guarded access
__global__ void axpy(float* y, const float* x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
//! by_struct: 0+0=W 0+8=R | pointer in a struct
__global__ void by_struct(Pair s) { int i = threadIdx.x; if (i < s.n) s.out[i * s.stride] = s.in[i]; }
//! pointer_table: 0=R *=unknown | pointer from memory
__global__ void pointer_table(float** t) { t[threadIdx.x][0] = 1.f; }
//! conditional: 0=W 1=W | selp
__global__ void conditional(float* a, float* b, int c) { float* p = c ? a : b; p[threadIdx.x] = 2.f; }
//! module_variable: 0=R *=unknown | module variable
__global__ void module_variable(float* a) { g_buffer[threadIdx.x] = a[threadIdx.x]; }
//! constant_table: 0=W | constant memory
__global__ void constant_table(float* a) { a[threadIdx.x] = c_table[threadIdx.x & 63]; }
//! histogram: 0=RW 1=R | atomics, loops
__global__ void histogram(int* h, const unsigned char* d, size_t n) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(h + d[i], 1);
}
//! reverse_block: 0=W 1=R | shared memory
__global__ void reverse_block(float* o, const float* in) {
  __shared__ float s[256];
  s[threadIdx.x] = in[threadIdx.x]; __syncthreads(); o[threadIdx.x] = s[255 - threadIdx.x];
}
//! calls: 0=W 1=R | called function
__global__ void calls(float* o, const float* in) { twice(o, in, threadIdx.x); }
//! calls_twice: 0=RW 1=RW 2=R | called function, two call sites
__global__ void calls_twice(float* a, float* b, const float* c) { twice(a, b, threadIdx.x); twice(b, a, 3); b[9] = c[1]; }
//! returns_pointer: 0=W 1=W | called function, returned pointer
__global__ void returns_pointer(float* a, float* b, int k) { *pick(a, b, k) = 1; }
//! recursive: 0=W | recursion
__global__ void recursive(float* a, int k, int* out) { int d = depth(a, k); if (d > 1 << 30) a[0] = d; }
//! multi_tensor: 0+0=RW 0+8=RW 0+16=RW 0+24=RW 0+32=RW 0+40=RW 0+48=RW 0+56=RW | pointer in a struct, dynamic index
__global__ void multi_tensor(Table m) { float* p = m.p[blockIdx.x & 7]; p[threadIdx.x] *= 2; }
//! indirect: 1=unknown *=unknown | indirect call
__global__ void indirect(Callback f, float* a, float* b) { f(a, 1); }
//! slow_sine: 0=RW | private table
__global__ void slow_sine(float* a) { a[threadIdx.x] = sinf(a[threadIdx.x]); }
//! local_array: 0=W 1=W 3=R | pointers in local memory
__global__ void local_array(float* a, float* b, int k, const float* c) { float* t[4] = {a, b, a, b}; t[k & 3][threadIdx.x] = c[0]; }
//! prints: 0=R | printf
__global__ void prints(const float* a) { printf("%f\n", a[0]); }
//! linked_list: 0=R 1=W *=unknown | pointer from memory, loops
__global__ void linked_list(const Node* n, float* o) { float s = 0; while (n) { s += n->value; n = n->next; } *o = s; }
//! aligned: 0=R 1=W | masked pointer, vector access
__global__ void aligned(const float* a, float4* o) {
  const float4* p = (const float4*)((unsigned long long)a & ~15ull); o[threadIdx.x] = p[threadIdx.x];
}
//! gather: 0=W 1=R 2=R | index from memory
__global__ void gather(float* o, const float* x, const long* index) { o[threadIdx.x] = x[index[threadIdx.x]]; }
//! async_copy: 0=R 1=W | cp.async
__global__ void async_copy(const float4* a, float4* o) {
  __shared__ float4 s[128];
  __pipeline_memcpy_async(&s[threadIdx.x], &a[threadIdx.x], 16); __pipeline_commit(); __pipeline_wait_prior(0);
  __syncthreads(); o[threadIdx.x] = s[127 - threadIdx.x];
}
//! tensor_core: 0=R 1=R 2=W | wmma
__global__ void tensor_core(const half* a, const half* b, float* c) {
  using namespace nvcuda;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
  wmma::fill_fragment(fc, 0.f); wmma::load_matrix_sync(fa, a, 16); wmma::load_matrix_sync(fb, b, 16);
  wmma::mma_sync(fc, fa, fb, fc); wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}
//! tiled_product: 0=R 1=R 2=W | shared memory, loops
__global__ void tiled_product(const float* a, const float* b, float* c, int n) {
  __shared__ float s[16][16], t[16][16];
  int x = threadIdx.x, y = threadIdx.y, col = blockIdx.x * 16 + x, row = blockIdx.y * 16 + y; float sum = 0;
  for (int k = 0; k < n; k += 16) {
    s[y][x] = a[row * n + k + x]; t[y][x] = b[(k + y) * n + col]; __syncthreads();
    for (int j = 0; j < 16; ++j) sum += s[y][j] * t[j][x];
    __syncthreads();
  }
  c[row * n + col] = sum;
}
//! warp_shuffle: 0=W 1=W | pointer through a shuffle
__global__ void warp_shuffle(float* a, float* b) {
  unsigned long long p = (unsigned long long)(threadIdx.x & 1 ? a : b); p = __shfl_xor_sync(~0u, p, 1); *(float*)p = 3;
}
//! swap_in_loop: 0=RW 1=RW | loops, pointers exchanged
__global__ void swap_in_loop(volatile float* a, volatile float* b, int n) {
  for (int i = 0; i < n; ++i) { b[threadIdx.x] = a[threadIdx.x] + 1; volatile float* t = a; a = b; b = t; }
}
//! address_in_number: 0=W | pointer passed as a number
__global__ void address_in_number(unsigned long long a) { *(volatile float*)a = 1; }
//! byte_shared: 0=R 1=W | generic address of shared memory
__global__ void byte_shared(const int* a, int* o, int k) {
  __shared__ int s[64]; int other[64];
  for (int i = 0; i < 64; ++i) other[i] = a[i]; s[threadIdx.x] = a[threadIdx.x]; __syncthreads();
  volatile int* p = k ? s : other; o[threadIdx.x] = p[threadIdx.x & 63];
}
//! untouched: 2=W | dead parameters
__global__ void untouched(float* a, const float* b, float* c) { if (a == b) c[0] = 1; }
//! max_atomic: 0=RW 1=RW | atomics, compare and swap
__global__ void max_atomic(unsigned long long* a, float* b) { atomicCAS(a, 1ull, 2ull); atomicExch(b, 1.f); }
}
