"""Triton kernels with their truth: `#! name: parameter=mode … | features`, hidden parameters counted.

Parameters of a compiled kernel are the arguments that are no constants, in order, then two scratch pointers.
"""

import triton
import triton.language as tl

P, N = "*fp32", "i32"
SIGNATURES = {}


def kernel(signature, **constants):
    def add(function):
        made = triton.jit(function)
        SIGNATURES[function.__name__] = (made, signature.split(), constants)
        return made

    return add


#! add: 0=R 1=R 2=W | Triton, hidden parameters, guarded access
@kernel("*fp32 *fp32 *fp32 i32", B=128)
def add(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


#! in_place: 0=RW | Triton
@kernel("*fp32 i32", B=128)
def in_place(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.exp(tl.load(x + i, i < n)), i < n)


#! row_sum: 0=R 1=W | Triton, shuffles
@kernel("*fp32 *fp32 i32", B=1024)
def row_sum(x, o, stride, B: tl.constexpr):
    r = tl.program_id(0)
    tl.store(o + r, tl.sum(tl.load(x + r * stride + tl.arange(0, B)), 0))


#! softmax: 0=R 1=W | Triton, shared memory
@kernel("*fp32 *fp32 i32 i32", B=1024)
def softmax(x, o, stride, n, B: tl.constexpr):
    r, i = tl.program_id(0), tl.arange(0, B)
    v = tl.load(x + r * stride + i, i < n, other=-float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(o + r * stride + i, e / tl.sum(e, 0), i < n)


#! loop_sum: 0=R 1=W | Triton, loops
@kernel("*fp32 *fp32 i32", B=128)
def loop_sum(x, o, n, B: tl.constexpr):
    s = tl.zeros((B,), tl.float32)
    for k in range(0, n, B):
        s += tl.load(x + k + tl.arange(0, B))
    tl.store(o + tl.arange(0, B), s)


#! matmul: 0=R 1=R 2=W | Triton, wgmma descriptors, loops, cp.async
@kernel("*fp16 *fp16 *fp16 i32 i32 i32", B=64)
def matmul(a, b, c, m, n, k, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    j = tl.program_id(1) * B + tl.arange(0, B)
    s = tl.zeros((B, B), tl.float32)
    for t in range(0, k, B):
        q = t + tl.arange(0, B)
        s = tl.dot(tl.load(a + i[:, None] * k + q[None, :]), tl.load(b + q[:, None] * n + j[None, :]), s)
    tl.store(c + i[:, None] * n + j[None, :], s.to(tl.float16))


#! gather: 0=R 1=R 2=W | Triton, index from memory
@kernel("*fp32 *i64 *fp32", B=128)
def gather(x, index, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + tl.load(index + i)))


#! scatter_add: 0=R 1=R 2=RW | Triton, atomics
@kernel("*fp32 *i32 *fp32", B=128)
def scatter_add(x, index, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.atomic_add(o + tl.load(index + i), tl.load(x + i))


#! table: 0=R 1=W *=unknown | Triton, pointer from memory
@kernel("*i64 *fp32", B=128)
def table(t, o, B: tl.constexpr):
    p = tl.load(t + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    tl.store(o + tl.arange(0, B), tl.load(p + tl.arange(0, B)))


#! choose: 0=W 1=W | Triton, selp
@kernel("*fp32 *fp32 i32", B=128)
def choose(a, b, c, B: tl.constexpr):
    if c > 0:
        p = a
    else:
        p = b
    tl.store(p + tl.arange(0, B), 1.0)


#! transpose: 0=R 1=W | Triton, shared memory
@kernel("*fp32 *fp32 i32", B=32)
def transpose(x, o, n, B: tl.constexpr):
    i, j = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1) * B + tl.arange(0, B)
    tl.store(o + j[:, None] * n + i[None, :], tl.trans(tl.load(x + i[:, None] * n + j[None, :])))


#! swiglu: 0=R 1=R 2=W | Triton
@kernel("*bf16 *bf16 *bf16 i32", B=256)
def swiglu(g, u, o, n, B: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    x = tl.load(g + i, i < n).to(tl.float32)
    tl.store(o + i, (x * tl.sigmoid(x) * tl.load(u + i, i < n)).to(tl.bfloat16), i < n)


#! norm: 0=R 1=R 2=W 3=W | Triton, reductions
@kernel("*fp32 *fp32 *fp32 *fp32 i32", B=512)
def norm(x, w, o, r, n, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    v = tl.load(x + row * n + i, i < n, other=0.0)
    s = tl.rsqrt(tl.sum(v * v, 0) / n + 1e-5)
    tl.store(r + row, s)
    tl.store(o + row * n + i, v * s * tl.load(w + i, i < n), i < n)


#! lock: 0=RW 1=RW | Triton, compare and swap, loops
@kernel("*i32 *fp32")
def lock(m, o):
    while tl.atomic_cas(m, 0, 1) == 1:
        pass
    tl.store(o, tl.load(o) + 1)
    tl.atomic_xchg(m, 0)


#! unused: 1=W | Triton, dead parameters
@kernel("*fp32 *fp32 i64", B=128)
def unused(x, o, n, B: tl.constexpr):
    tl.store(o + tl.arange(0, B) + n, 1.0)


#! bytes_of: 0=R 1=W | Triton, byte offsets of 64 bits
@kernel("*i8 *i8 i64", B=128)
def bytes_of(x, o, n, B: tl.constexpr):
    tl.store(o + n + tl.arange(0, B), tl.load(x + n * 3 + tl.arange(0, B)))


#! checked: 0=R 1=W | Triton, assertions
@kernel("*i32 *i32", B=128)
def checked(x, o, B: tl.constexpr):
    v = tl.load(x + tl.arange(0, B))
    tl.device_assert(v > 0, "positive")
    tl.store(o + tl.arange(0, B), v)
