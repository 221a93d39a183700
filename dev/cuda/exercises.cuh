/* exercises.cuh -- the thirty exercises of dev/doc/learn.md. `make -C dev/cuda learn` lists them. learn.py makes a file of
 * each for the reader: it has the lines of #else, or the rest of `// begins:` for the line above. Those of #ifdef SOLVED are
 * the solution. A heading has the number, the kind (finish, fault or predict) and the ladder of the zoo that checks the
 * exercise. A kernel to finish begins as `// here` if it has no #else. A prediction begins as 0, and has a solution alone. It
 * names a stored row, and must meet its ms within 20 %. `hint:` begins what is shown on demand.
 */

// ==== 1 finish rmsnorm forward: a thread a row
// One thread has a row, and writes out_i = x_i r w_i. Find r. llmc/rmsnorm.h has the formula.
// hint: r = 1 / sqrt(mean(x * x) + eps), and the loop already has the sum of the squares.
__global__ void one_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    const size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows.N) { return; }
    float square = 0;
    for (int c = 0; c < rows.C; c++) { square += to_float(x[n * rows.pitch + c]) * to_float(x[n * rows.pitch + c]); }
    const float r = 1.0f / sqrtf(square / (float)rows.C + eps);
    // begins: const float r = square * eps;
    rstd[n] = r;
    for (int c = 0; c < rows.C; c++) {
        out[n * rows.pitch + c] = from_float<floatX>(to_float(x[n * rows.pitch + c]) * r * to_float(weight[c]));
    }
}
static const Mine mine("forward", "exercise", forward<in_rows<one_kernel, 64, 1>>);

// ==== 2 finish rmsnorm forward: a tree in shared memory
// 256 threads have a part of the sum each. Add the parts by halves: 128 pairs, 64 pairs, ... 1 pair.
// hint: for (int half = 128; half > 0; half /= 2): threads below half add their partner's value; then all wait.
__global__ void two_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    __shared__ float shared[256];
    const int t = threadIdx.x;
    x += blockIdx.x * rows.pitch, out += blockIdx.x * rows.pitch;
    shared[t] = 0;
    for (int c = t; c < rows.C; c += 256) { shared[t] += to_float(x[c]) * to_float(x[c]); }
    __syncthreads();
#ifdef SOLVED
    for (int half = 128; half > 0; half /= 2) {
        if (t < half) { shared[t] += shared[t + half]; }
        __syncthreads();
    }
#endif
    const float r = 1.0f / sqrtf(shared[0] / (float)rows.C + eps);
    if (t == 0) { rstd[blockIdx.x] = r; }
    for (int c = t; c < rows.C; c += 256) { out[c] = from_float<floatX>(to_float(x[c]) * r * to_float(weight[c])); }
}
static const Mine mine("forward", "exercise", forward<in_rows<two_kernel, 1, 256>>);

// ==== 3 finish rmsnorm forward: a warp's sum by shuffles
// A warp has a row. __shfl_xor_sync(mask, value, k) returns the value of the lane whose number differs in the bits of k. Five
// exchanges give every lane the sum of all 32.
// hint: exchange with k = 16, 8, 4, 2 and 1, and add what comes; the mask of all lanes is ~0u.
__global__ void three_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows.N) { return; }
    x += n * rows.pitch, out += n * rows.pitch;
    float square = 0;
    for (int c = threadIdx.x; c < rows.C; c += 32) { square += to_float(x[c]) * to_float(x[c]); }
#ifdef SOLVED
    for (int k = 16; k > 0; k /= 2) { square += __shfl_xor_sync(~0u, square, k); }
#endif
    const float r = 1.0f / sqrtf(square / (float)rows.C + eps);
    if (threadIdx.x == 0) { rstd[n] = r; }
    for (int c = threadIdx.x; c < rows.C; c += 32) { out[c] = from_float<floatX>(to_float(x[c]) * r * to_float(weight[c])); }
}
static const Mine mine("forward", "exercise", forward<in_rows<three_kernel, 8, 32>>);

// ==== 4 finish rmsnorm backward: dx
// A thread a row. dx_j grows by dout_j w_j r - x_j r^3 mean(dout w x). A second kernel, a thread a column, finds dweight.
// hint: one loop for the sum of dout w x over the row, and a second one that adds to dx.
__global__ void four_dx(floatX* dx, const floatX* dout, const floatX* x, const floatX* weight, const float* rstd,
                        RowShape rows) {
    const size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x, at = n * rows.pitch;
    if (n >= rows.N) { return; }
    const float r = rstd[n];
#ifdef SOLVED
    float dot = 0;
    for (int c = 0; c < rows.C; c++) { dot += to_float(dout[at + c]) * to_float(weight[c]) * to_float(x[at + c]); }
    for (int c = 0; c < rows.C; c++) {
        const float d = to_float(dout[at + c]) * to_float(weight[c]) * r;
        dx[at + c] = from_float<floatX>(to_float(dx[at + c]) + d - to_float(x[at + c]) * r * r * r * dot / (float)rows.C);
    }
#else
    for (int c = 0; c < rows.C; c++) { dx[at + c] = from_float<floatX>(to_float(dx[at + c]) + r); }
#endif
}
__global__ void four_dweight(float* dweight, const floatX* dout, const floatX* x, const float* rstd, RowShape rows) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= rows.C) { return; }
    float sum = 0;
    for (size_t n = 0; n < rows.N; n++) {
        sum += to_float(dout[n * rows.pitch + c]) * to_float(x[n * rows.pitch + c]) * rstd[n];
    }
    dweight[c] += sum;
}
static void four(floatX* dx, float* dweight, void*, const floatX* dout, const floatX* x, const floatX* weight,
                 const float* rstd, RowShape rows, cudaStream_t stream) {
    four_dx<<<blocks_for(rows.N, 64), 64, 0, stream>>>(dx, dout, x, weight, rstd, rows);
    four_dweight<<<blocks_for(rows.C, 64), 64, 0, stream>>>(dweight, dout, x, rstd, rows);
}
static const Mine mine("backward", "exercise", backward<four>);

// ==== 5 finish softmax forward: no overflow
// A thread a row. e^x overflows in fp32 above 88, and the scores reach 200. The result must not change.
// hint: e^(s - m) / sum e^(s - m) is the same for every m. With m the largest score no term exceeds 1.
__global__ void five_kernel(floatX* p, const floatX* s, Squares m) {
    const size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m.rows) { return; }
    s += row * m.pitch, p += row * m.pitch;
    float largest = 0, sum = 0;
#ifdef SOLVED
    largest = -INFINITY;
    for (int u = 0; u < m.T; u++) { largest = fmaxf(largest, to_float(s[u])); }
#endif
    for (int u = 0; u < m.T; u++) { sum += expf(to_float(s[u]) - largest); }
    for (int u = 0; u < m.T; u++) { p[u] = from_float<floatX>(expf(to_float(s[u]) - largest) / sum); }
}
static const Mine mine("forward", "exercise", forward<in_rows<five_kernel, 64, 1>>);

// ==== 6 finish softmax forward: online
// One pass finds both the maximum and the sum. When a larger maximum comes, the sum so far was relative to the old one.
// hint: multiply the old sum by e^(before - largest), then add e^(x - largest).
__global__ void six_kernel(floatX* p, const floatX* s, Squares m) {
    const size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m.rows) { return; }
    s += row * m.pitch, p += row * m.pitch;
    float largest = -FLT_MAX, sum = 0;
    for (int u = 0; u < m.T; u++) {
        const float x = to_float(s[u]), before = largest;
        largest = fmaxf(largest, x);
        sum = sum * expf(before - largest) + expf(x - largest);
        // begins: sum += before == largest ? 1 : 2;
    }
    for (int u = 0; u < m.T; u++) { p[u] = from_float<floatX>(expf(to_float(s[u]) - largest) / sum); }
}
static const Mine mine("forward", "exercise", forward<in_rows<six_kernel, 64, 1>>);

// ==== 7 finish softmax forward: two lanes' results become one
// Each lane of a warp has a maximum and a sum of its own, relative to that maximum. Join them.
// hint: first warp_max(mine); then each sum is multiplied by e^(mine - largest), and warp_sum() adds them.
__global__ void seven_kernel(floatX* p, const floatX* s, Squares m) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= m.rows) { return; }
    s += row * m.pitch, p += row * m.pitch;
    float mine = -FLT_MAX, sum = 0;
    for (int u = threadIdx.x; u < m.T; u += 32) {
        const float x = to_float(s[u]), before = mine;
        mine = fmaxf(mine, x);
        sum = sum * expf(before - mine) + expf(x - mine);
    }
#ifdef SOLVED
    const float largest = warp_max(mine);
    sum = warp_sum(sum * expf(mine - largest));
#else
    const float largest = mine;
#endif
    for (int u = threadIdx.x; u < m.T; u += 32) { p[u] = from_float<floatX>(expf(to_float(s[u]) - largest) / sum); }
}
static const Mine mine("forward", "exercise", forward<in_rows<seven_kernel, 8, 32>>);

// ==== 8 finish matmul forward: a thread a sum
// out (N, OC) = x (N, C) times the transpose of w (OC, C). All three are packed.
// hint: out[n][o] is the sum over k of x[n][k] w[o][k]; a row of x and of w has C elements.
__global__ void eight_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s) {
    const int o = blockIdx.x * 16 + threadIdx.x, n = blockIdx.y * 16 + threadIdx.y;
    if (n >= s.N || o >= s.OC) { return; }
    float sum = 0;
#ifdef SOLVED
    for (int k = 0; k < s.C; k++) { sum += to_float(x[(size_t)n * s.C + k]) * to_float(w[(size_t)o * s.C + k]); }
#endif
    out[(size_t)n * s.OC + o] = from_float<floatX>(sum);
}
static const Mine mine("forward", "exercise", forward<floatX, in_tiles<eight_kernel, 16>>);

// ==== 9 finish matmul forward: a tile in shared memory
// A block has 16 x 16 sums. It reads 16 columns of its rows of x and w at a time. C need not be a multiple of 16.
// hint: each thread loads an element of both, or 0 past the end; then a barrier, 16 products, and a barrier.
__global__ void nine_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s) {
    __shared__ float xs[16][17], ws[16][17];
    const int tx = threadIdx.x, ty = threadIdx.y, n0 = blockIdx.y * 16, o0 = blockIdx.x * 16;
    float sum = 0;
    for (int k0 = 0; k0 < s.C; k0 += 16) {
#ifdef SOLVED
        const bool in = k0 + tx < s.C;
        xs[ty][tx] = in && n0 + ty < s.N ? to_float(x[(size_t)(n0 + ty) * s.C + k0 + tx]) : 0;
        ws[ty][tx] = in && o0 + ty < s.OC ? to_float(w[(size_t)(o0 + ty) * s.C + k0 + tx]) : 0;
#else
        xs[ty][tx] = ws[ty][tx] = 0;
#endif
        __syncthreads();
        for (int k = 0; k < 16; k++) { sum += xs[ty][k] * ws[tx][k]; }
        __syncthreads();
    }
    if (n0 + ty < s.N && o0 + tx < s.OC) { out[(size_t)(n0 + ty) * s.OC + o0 + tx] = from_float<floatX>(sum); }
}
static const Mine mine("forward", "exercise", forward<floatX, in_tiles<nine_kernel, 16>>);

// ==== 10 finish layout permute: a tile is turned
// x is B matrices (T, C), out their transposes (C, T). The block has read a tile of x by its rows. Write it by the rows of out.
// hint: row c0 + threadIdx.y of out, its element t0 + threadIdx.x; in the tile the two change places.
__global__ void ten_kernel(floatX* out, const floatX* x, Turn m) {
    __shared__ floatX tile[16][17];  // [t][c]
    const unsigned tx = threadIdx.x, ty = threadIdx.y, c0 = blockIdx.x * 16, t0 = blockIdx.y * 16, b = blockIdx.z;
    if (t0 + ty < m.T && c0 + tx < m.C) { tile[ty][tx] = x[((size_t)b * m.T + t0 + ty) * m.pitch + c0 + tx]; }
    __syncthreads();
    if (c0 + ty < m.C && t0 + tx < m.T) { out[((size_t)b * m.C + c0 + ty) * m.out_pitch + t0 + tx] = tile[tx][ty]; }
    // begins: if (c0 + tx < m.C && t0 + ty < m.T) { out[((size_t)b * m.C + c0 + tx) * m.out_pitch + t0 + ty] = tile[tx][ty]; }
}
static void ten(floatX* out, const floatX* x, Turn m, cudaStream_t stream) {
    ten_kernel<<<dim3(blocks_for(m.C, 16), blocks_for(m.T, 16), m.B), dim3(16, 16), 0, stream>>>(out, x, m);
}
static const Mine mine("permute", "exercise", permute<ten>);

// ==== 11 finish embedding forward: look rows up
// Row n of out is the row of the table that token n names. Rows of out are `pitch` apart, those of the table C.
// hint: out[n * pitch + c] = table[tokens[n] * C + c], in size_t, for this thread's columns.
__global__ void eleven_kernel(floatX* out, const floatX* table, const int32_t* tokens, int C, size_t pitch) {
    const size_t n = blockIdx.x;
    for (int c = threadIdx.x; c < C; c += 64) { out[n * pitch + c] = table[(size_t)tokens[n] * C + c]; }
    // begins: for (int c = threadIdx.x; c < C; c += 64) { out[n * pitch + c] = table[(size_t)tokens[0] * C + c]; }
}
static void eleven(floatX* out, const floatX* table, const int32_t* tokens, RowShape rows, cudaStream_t stream) {
    eleven_kernel<<<(unsigned)rows.N, 64, 0, stream>>>(out, table, tokens, rows.C, rows.pitch);
}
static const Mine mine("forward", "exercise", forward<eleven>);

// ==== 12 finish embedding backward: the same bits in every run
// dtable's row v grows by dout's rows n whose token is v. Atomic additions come in any order. Here a block has a row v of the
// table, a thread a column: who adds what, and in which order?
// hint: each thread walks over all N tokens, and adds where the token is its row's. Nobody else adds to its element.
__global__ void twelve_kernel(float* dtable, const floatX* dout, const int32_t* tokens, size_t N, int C, size_t pitch) {
    const int v = blockIdx.x;
    for (int c = threadIdx.x; c < C; c += 64) {
        float sum = 0;
        for (size_t n = 0; n < N; n++) { sum += tokens[n] == v ? to_float(dout[n * pitch + c]) : 0; }
        // begins: for (size_t n = 0; n < N; n++) { sum += to_float(dout[n * pitch + c]); }
        dtable[(size_t)v * C + c] += sum;
    }
}
static void twelve(float* dtable, void*, const floatX* dout, const int32_t* tokens, int V, RowShape rows, cudaStream_t stream) {
    twelve_kernel<<<(unsigned)V, 64, 0, stream>>>(dtable, dout, tokens, rows.N, rows.C, rows.pitch);
}
static const Mine mine("backward", "exercise", backward<twelve>);

// ==== 13 fault rmsnorm forward: two runs differ
// The sums are sometimes too small. What does a thread read that nobody may have written yet?
// hint: between the last round of the tree and the next one, all threads must have finished adding.
__global__ void thirteen_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    __shared__ float shared[256];
    const int t = threadIdx.x;
    x += blockIdx.x * rows.pitch, out += blockIdx.x * rows.pitch;
    shared[t] = 0;
    for (int c = t; c < rows.C; c += 256) { shared[t] += to_float(x[c]) * to_float(x[c]); }
#ifdef SOLVED
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (t < half) { shared[t] += shared[t + half]; }
        __syncthreads();
    }
#else
    for (int half = 128; half > 0; half /= 2) {
        if (t < half) { shared[t] += shared[t + half]; }
    }
    __syncthreads();
#endif
    const float r = 1.0f / sqrtf(shared[0] / (float)rows.C + eps);
    if (t == 0) { rstd[blockIdx.x] = r; }
    for (int c = t; c < rows.C; c += 256) { out[c] = from_float<floatX>(to_float(x[c]) * r * to_float(weight[c])); }
}
static const Mine mine("forward", "exercise", forward<in_rows<thirteen_kernel, 1, 256>>);

// ==== 14 fault rmsnorm forward: only the last rows are wrong
// 33 rows, 8 a block. Some threads have no row. What do they do?
// hint: a grid is whole blocks, so n may be N or more. Such a thread must leave before it touches memory.
__global__ void fourteen_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    const size_t n = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (n >= rows.N) { return; }
    // begins: if (n > rows.N) { return; }
    float square = 0;
    for (int c = threadIdx.x; c < rows.C; c += 32) {
        square += to_float(x[n * rows.pitch + c]) * to_float(x[n * rows.pitch + c]);
    }
    const float r = 1.0f / sqrtf(warp_sum(square) / (float)rows.C + eps);
    if (threadIdx.x == 0) { rstd[n] = r; }
    for (int c = threadIdx.x; c < rows.C; c += 32) {
        out[n * rows.pitch + c] = from_float<floatX>(to_float(x[n * rows.pitch + c]) * r * to_float(weight[c]));
    }
}
static const Mine mine("forward", "exercise", forward<in_rows<fourteen_kernel, 8, 32>>);

// ==== 15 fault rmsnorm forward: right at one shape
// It passes where rows lie without padding.
// hint: row n begins at n * pitch, not at n * C.
__global__ void fifteen_kernel(floatX* out, float* rstd, const floatX* x, const floatX* weight, RowShape rows, float eps) {
    const size_t n = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows.N) { return; }
    x += n * rows.pitch, out += n * rows.pitch;
    // begins: x += n * rows.C, out += n * rows.C;
    float square = 0;
    for (int c = 0; c < rows.C; c++) { square += to_float(x[c]) * to_float(x[c]); }
    rstd[n] = 1.0f / sqrtf(square / (float)rows.C + eps);
    for (int c = 0; c < rows.C; c++) { out[c] = from_float<floatX>(to_float(x[c]) * rstd[n] * to_float(weight[c])); }
}
static const Mine mine("forward", "exercise", forward<in_rows<fifteen_kernel, 64, 1>>);

// ==== 16 fault rmsnorm backward: dweight, half of the time
// All threads add the rows of a column into one word of shared memory. What if another thread writes it after you have read it?
// hint: `total += d` is a read, an addition and a write. Let each thread add up its rows alone, then block_sum().
__global__ void sixteen_dweight(float* dweight, const floatX* dout, const floatX* x, const float* rstd, RowShape rows) {
    __shared__ float shared[32];
    __shared__ volatile float total;
    const int c = blockIdx.x;
    if (threadIdx.x == 0) { total = 0; }
    __syncthreads();
    float d = 0;
    for (size_t n = threadIdx.x; n < rows.N; n += 64) {
        d += to_float(dout[n * rows.pitch + c]) * to_float(x[n * rows.pitch + c]) * rstd[n];
    }
#ifdef SOLVED
    d = block_sum(d, shared);
    if (threadIdx.x == 0) { total = d; }
#else
    const float before = total;
    shared[threadIdx.x % 32] = 0;
    __syncwarp();
    total = before + d;
#endif
    __syncthreads();
    if (threadIdx.x == 0) { dweight[c] += total; }
}
__global__ void sixteen_dx(floatX* dx, const floatX* dout, const floatX* x, const floatX* weight, const float* rstd,
                           RowShape rows) {
    const size_t at = blockIdx.x * rows.pitch;
    backward_row(dx + at, dout + at, x + at, weight, rstd[blockIdx.x], rows.C, [](int, float) {});
}
static void sixteen(floatX* dx, float* dweight, void*, const floatX* dout, const floatX* x, const floatX* weight,
                    const float* rstd, RowShape rows, cudaStream_t stream) {
    sixteen_dx<<<(unsigned)rows.N, 256, 0, stream>>>(dx, dout, x, weight, rstd, rows);
    sixteen_dweight<<<(unsigned)rows.C, 64, 0, stream>>>(dweight, dout, x, rstd, rows);
}
static const Mine mine("backward", "exercise", backward<sixteen>);

// ==== 17 fault softmax forward: the first row has no weight
// The kernel knows the diagonal, and reads no score above it.
// hint: row t sees the columns up to t, t itself included.
__global__ void seventeen_kernel(floatX* p, const floatX* s, Squares m) {
    const size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m.rows) { return; }
    const int end = (int)(row % m.T) + 1;
    // begins: const int end = (int)(row % m.T);
    s += row * m.pitch, p += row * m.pitch;
    float largest = -INFINITY, sum = 0;
    for (int u = 0; u < end; u++) { largest = fmaxf(largest, to_float(s[u])); }
    for (int u = 0; u < end; u++) { sum += expf(to_float(s[u]) - largest); }
    for (int u = 0; u < m.T; u++) { p[u] = from_float<floatX>(u < end ? expf(to_float(s[u]) - largest) / sum : 0); }
}
static const Mine mine("forward", "exercise", forward<in_rows<seventeen_kernel, 64, 1>>);

// ==== 18 fault softmax forward: a shuffle without its lanes
// The card stops: a shuffle reads a lane that did not come.
// hint: the loop ends earlier for some lanes of a warp. A shuffle inside it has fewer than 32 lanes at the end.
__global__ void eighteen_kernel(floatX* p, const floatX* s, Squares m) {
    const size_t row = (size_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= m.rows) { return; }
    s += row * m.pitch, p += row * m.pitch;
    float largest = -INFINITY, sum = 0;
#ifdef SOLVED
    for (int u = threadIdx.x; u < m.T; u += 32) { largest = fmaxf(largest, to_float(s[u])); }
    largest = warp_max(largest);
#else
    for (int u = threadIdx.x; u < m.T; u += 32) { largest = fmaxf(largest, warp_max(to_float(s[u]))); }
#endif
    for (int u = threadIdx.x; u < m.T; u += 32) { sum += expf(to_float(s[u]) - largest); }
    sum = warp_sum(sum);
    for (int u = threadIdx.x; u < m.T; u += 32) { p[u] = from_float<floatX>(expf(to_float(s[u]) - largest) / sum); }
}
static const Mine mine("forward", "exercise", forward<in_rows<eighteen_kernel, 8, 32>>);

// ==== 19 fault matmul forward: right where C is a multiple of 16
// The tile loads only what lies inside the matrices. What do the other places hold?
// hint: a place that is not written keeps what an earlier part left there. Past the end it must be 0.
__global__ void nineteen_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s) {
    __shared__ float xs[16][17], ws[16][17];
    const int tx = threadIdx.x, ty = threadIdx.y, n0 = blockIdx.y * 16, o0 = blockIdx.x * 16;
    float sum = 0;
    for (int k0 = 0; k0 < s.C; k0 += 16) {
#ifdef SOLVED
        xs[ty][tx] = ws[ty][tx] = 0;
#endif
        if (k0 + tx < s.C && n0 + ty < s.N) { xs[ty][tx] = to_float(x[(size_t)(n0 + ty) * s.C + k0 + tx]); }
        if (k0 + tx < s.C && o0 + ty < s.OC) { ws[ty][tx] = to_float(w[(size_t)(o0 + ty) * s.C + k0 + tx]); }
        __syncthreads();
        for (int k = 0; k < 16; k++) { sum += xs[ty][k] * ws[tx][k]; }
        __syncthreads();
    }
    if (n0 + ty < s.N && o0 + tx < s.OC) { out[(size_t)(n0 + ty) * s.OC + o0 + tx] = from_float<floatX>(sum); }
}
static const Mine mine("forward", "exercise", forward<floatX, in_tiles<nineteen_kernel, 16>>);

// ==== 20 fault matmul forward: a fast thread
// A thread that has finished its 16 products loads the next part. Who still needs the old one?
// hint: two barriers a part: one after the loads, one after the products.
__global__ void twenty_kernel(floatX* out, const floatX* x, const floatX* w, Sizes s) {
    __shared__ float xs[16][17], ws[16][17];
    const int tx = threadIdx.x, ty = threadIdx.y, n0 = blockIdx.y * 16, o0 = blockIdx.x * 16;
    float sum = 0;
    for (int k0 = 0; k0 < s.C; k0 += 16) {
        const bool in = k0 + tx < s.C;
        xs[ty][tx] = in && n0 + ty < s.N ? to_float(x[(size_t)(n0 + ty) * s.C + k0 + tx]) : 0;
        ws[ty][tx] = in && o0 + ty < s.OC ? to_float(w[(size_t)(o0 + ty) * s.C + k0 + tx]) : 0;
        __syncthreads();
        for (int k = 0; k < 16; k++) { sum += xs[ty][k] * ws[tx][k]; }
#ifdef SOLVED
        __syncthreads();
#endif
    }
    if (n0 + ty < s.N && o0 + tx < s.OC) { out[(size_t)(n0 + ty) * s.OC + o0 + tx] = from_float<floatX>(sum); }
}
static const Mine mine("forward", "exercise", forward<floatX, in_tiles<twenty_kernel, 16>>);

// ==== 21 fault layout backward: the wrong key head
// NH query heads share NKV key heads: query heads 0 to NH / NKV - 1 have key head 0, and so on. dk gets the sum of its group.
// hint: the group of key head j is the query heads j * (NH / NKV) + i, not those whose number leaves the remainder j.
__global__ void twenty_one_kernel(float* dk, const floatX* dcopy, Heads s) {
    const int i = threadIdx.x + blockIdx.y * 64, j = i / s.HD, group = s.NH / s.NKV;
    if (j >= s.NKV) { return; }
    float sum = 0;
    for (int g = 0; g < group; g++) {
        const int h = j * group + g;
        // begins: const int h = g * s.NKV + j;
        sum += to_float(dcopy[blockIdx.x * s.q_pitch + h * s.HD + i % s.HD]);
    }
    dk[blockIdx.x * (size_t)(s.NKV * s.HD) + i] += sum;
}
static void twenty_one(const Case& c, cudaStream_t stream) {
    const Heads s = heads_of(c);
    twenty_one_kernel<<<dim3((unsigned)s.N, blocks_for(s.NKV * s.HD, 64)), 64, 0, stream>>>(c.at<float>(DK),
                                                                                            c.at<floatX>(DCOPY), s);
}
static const Mine mine("backward", "exercise", twenty_one);

// ==== 22 fault embedding backward: some gradients are lost
// dtable has gradients already, of the output layer where the two share their weights.
// hint: a gradient is added to what is there: +=.
__global__ void twenty_two_kernel(float* dtable, const floatX* dout, const int32_t* tokens, size_t N, int C, size_t pitch) {
    const int v = blockIdx.x;
    for (int c = threadIdx.x; c < C; c += 64) {
        float sum = 0;
        for (size_t n = 0; n < N; n++) { sum += tokens[n] == v ? to_float(dout[n * pitch + c]) : 0; }
        dtable[(size_t)v * C + c] += sum;
        // begins: dtable[(size_t)v * C + c] = sum;
    }
}
static void twenty_two(float* dtable, void*, const floatX* dout, const int32_t* tokens, int V, RowShape rows,
                       cudaStream_t stream) {
    twenty_two_kernel<<<(unsigned)V, 64, 0, stream>>>(dtable, dout, tokens, rows.N, rows.C, rows.pitch);
}
static const Mine mine("backward", "exercise", backward<twenty_two>);

// ==== 23 predict rmsnorm forward 4 N,C=262144,2048: memory alone
// The H100 of the stored results copies 2.99e12 bytes a second, read and written together. Version 4 of RMSNorm's forward pass
// reads each element of x once and writes out once, 2 bytes each. How many ms does it take?
// hint: bytes by rate. 262,144 rows of 2,048 elements, twice 2 bytes.
const double ms = 1e3 * 2 * 2 * 262144.0 * 2048 / 2.99e12;

// ==== 24 predict rmsnorm backward 4 N,C=262144,2048: what does a backward pass move?
// dx is added to. The rows of dout and x are read. 2 bytes an element, 2.99e12 bytes a second.
// hint: read dout, read x, read dx, write dx.
const double ms = 1e3 * 4 * 2 * 262144.0 * 2048 / 2.99e12;

// ==== 25 predict rmsnorm backward 2 N,C=262144,2048: trips
// Version 2 has 4 blocks of 256 threads on each of 132 SMs. Each takes the rows one after the other. A thread waits for each of
// its 2048 / 256 elements of a row and twice more, each wait as long as two trips of 354 ns. Memory would take 1.4 ms.
// hint: rows a block, times waits a row, times 2 * 354 ns. It is longer than memory takes, so it counts alone.
const double ms = 1e3 * 262144.0 / (4 * 132) * (2048 / 256 + 2) * 2 * 354e-9;

// ==== 26 predict softmax forward 4 H,T=64,2048: half of a square
// 64 matrices of 2048 x 2048 scores of 2 bytes. Version 4 reads the half below the diagonal and writes all.
// hint: 1.5 elements for each score.
const double ms = 1e3 * 1.5 * 2 * 64.0 * 2048 * 2048 / 2.99e12;

// ==== 27 predict swiglu recompute 3 N,F=65536,8192: forward and backward in one pass
// It reads the gate, the up projection and dout, and writes out and both gradients: 65,536 rows of 8,192, 2 bytes each.
// hint: six tensors.
const double ms = 1e3 * 6 * 2 * 65536.0 * 8192 / 2.99e12;

// ==== 28 predict adamw update 3 FP32 n,tensors=268435456,256: the optimizer
// AdamW in FP32 reads a gradient, and reads and writes a weight and two moments: 268,435,456 of each, 4 bytes.
// hint: 1 + 3 * 2 numbers of 4 bytes a parameter.
const double ms = 1e3 * 7 * 4 * 268435456.0 / 2.99e12;

// ==== 29 predict matmul forward 3 FP32 N,C,OC=32768,2048,8192: instructions
// Version 3 needs two loads from shared memory for each multiplication. A warp's load takes as long as 4 warps' additions. The
// card runs 3.345e13 instructions of threads a second, in which an addition counts 1.
// hint: N C OC multiplications, of 2 * 4 + 1 instructions each.
const double ms = 1e3 * 9 * 32768.0 * 2048 * 8192 / 3.345e13;

// ==== 30 predict matmul forward 19 N,C,OC=65536,2048,8192: tensor cores
// cuBLASLt does 7.05e14 operations a second here, and the trainer's kernel nearly as many. A multiplication and an addition are
// two. Is memory slower?
// hint: 2 N C OC operations by the rate; the three matrices of 2 bytes by 2.99e12 take less.
const double ms = 1e3 * 2 * 65536.0 * 2048 * 8192 / 7.05e14;
