/* muon.cu -- Newton and Schulz's five steps in steps: X of M matrices u of R rows and C >= R columns. The formula stands in
 * llmc/optim/muon.h, the lesson in dev/doc/bugs.md.
 *
 *   make -C dev/cuda muon && build/zoo/muon [orthogonalize] [N...]
 *
 * A step is three products, A = X X^T, B = b A + c A A and a X + B X: 4 R R C + 2 R R R operations. All versions but 2 compute
 * with cuBLASLt. The question is how many products of which shape there are, and how many matrices are in a launch.
 */
#include "llmc/optim/muon.cuh"
#include "dev/cuda/product.cuh"

enum { U, X, ROOM };

/* The parts of ROOM. Matrices of a kind lie side by side, which is matrix_stride() at these shapes. */
struct Buffers {
    size_t M, R, C;
    float* u;
    floatX *x, *copy, *gram, *poly, *sum, *next;  // (R, C) twice, then (R, R)
    double* sums;
    explicit Buffers(const Case& c) : M(c.n[0]), R(c.n[1]), C(c.n[2]), u((float*)c.at<char>(ROOM)), x(c.at<floatX>(X)) {
        const size_t n = M * R * C, square = M * R * R;
        copy = (floatX*)(u + n), gram = copy + n, poly = gram + square, sum = poly + square, next = sum + square;
        sums = (double*)(next + square);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// 0: all matrices of a shape go through each product in one launch. 1: a matrix after the other. 2, the trainer's on Hopper: as
// 0, but of X X^T and A A only the tiles on and above the diagonal are computed. Each is stored twice.

template <bool TOGETHER, bool HALVES = false>
static void trainer(const Case& c, cudaStream_t stream) {
    const Buffers b(c);
    const size_t each = b.R * b.C, count = TOGETHER ? b.M : 1;
    CUDA_CHECK(cudaMemcpyAsync(b.u, c.at<float>(U), b.M * each * sizeof(float), cudaMemcpyDeviceToDevice, stream));
    for (size_t i = 0; i < b.M; i += count) {
        float* u = b.u + i * each;
        muon_orthogonalize_by(product_context(), u, b.R, b.C, (int)count, b.copy, HALVES && muon_halves(b.R, b.C), stream);
        CUDA_CHECK(cudaMemcpyAsync(b.x + i * each, u, count * each * sizeof(floatX), cudaMemcpyDeviceToDevice, stream));
    }
}

/* Predicts a version whose steps have `wide` products of 2 R R C operations and `square` ones of 2 R R R. */
static Work predict(const Case& c, double wide, double square, double launches, double rests = 1) {
    const double R = (double)c.n[1], C = (double)c.n[2];
    return {c.bytes / 32, rests * c.flops * (wide * C + square * R) / (10 * C + 5 * R), 0, 0, launches};
}
static Work predict0(const Case& c) { return predict(c, 10, 5, 19); }
// An SM multiplies a tile of 128 x 256 at a time. A matrix alone has too few for all, and its last ones leave SMs without work.
static Work predict1(const Case& c) {
    const double tiles = ceil((double)c.n[1] / 128) * ceil((double)c.n[2] / 256), n = sms() > 0 ? sms() : 1;
    return predict(c, 10, 5, 19 * (double)c.n[0], ceil(tiles / n) * n / tiles);
}

// Two tiles of 128 x 128, which version 2 has, take an SM the time of one of 128 x 256.
static Work predict2(const Case& c) {
    const double R = (double)c.n[1], n = sms() > 0 ? sms() : 1, whole = (double)c.n[0] * R / 128 * R / 128,
                 half = whole * (R / 256 + 1) / (R / 128), rounds = ceil(half / n) / (2 * ceil(whole / 2 / n));
    return predict(c, 5 + 5 * rounds, 5 * rounds, 19);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3: the Gram form (Dao AI Lab, "Gram Newton-Schulz", 2026). X is always Q X_0, and A is Q A_0 Q. So the steps need only square
// products: Q <- (a I + B) Q, A <- (a I + B) A (a I + B). One product makes A_0, one the last X. 4: A has the squares of X's
// singular values, so the small ones lose more digits. Before the third step, A is computed from X again.

__global__ void begin_kernel(floatX* sum, const floatX* poly, size_t R, size_t n) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n) { sum[i] = from_float<floatX>(to_float(poly[i]) + (i / R % R == i % R ? (float)MUON_A : 0)); }
}

/* out = f.product x y + f.added add, of the square matrices. */
static void square(const Buffers& b, floatX* out, const floatX* x, const floatX* y, const floatX* add, SumFactors f,
                   cudaStream_t stream) {
    matmul_product(product_context(), output(out, b.R), {operand(x, b.R), AS_IS}, {operand(y, b.R), AS_IS}, add,
                   {b.R, b.R, b.R}, stream, f, (int)b.M);
}

template <int RESTART>
static void gram_form(const Case& c, cudaStream_t stream) {
    Buffers b(c);
    const size_t each = b.R * b.C, squares = b.M * b.R * b.R;
    const SumFactors step = {1.0f, (float)MUON_A}, plain = {1.0f, 0.0f};
    floatX *from = RESTART ? b.x : b.copy, *to = RESTART ? b.copy : b.x;
    muon_norm_kernel<<<dim3((unsigned)muon_sums(each), (unsigned)b.M), MUON_THREADS, 0, stream>>>(b.sums, c.at<float>(U), each);
    const dim3 blocks((unsigned)size_min(ceil_div(each, (size_t)16 * NORM_SUM_THREADS), 1024), (unsigned)b.M);
    muon_scale_kernel<<<blocks, NORM_SUM_THREADS, 0, stream>>>(from, c.at<float>(U), b.sums, each);
    for (int i = 0; i < MUON_STEPS; i++) {
        const bool first = i == 0 || i == RESTART;
        const Factor x = {operand(from, b.C), AS_IS}, turned = {x.o, TRANSPOSED};
        if (first) {
            matmul_product(product_context(), output(b.gram, b.R), x, turned, NULL, {b.R, b.R, b.C}, stream, plain, (int)b.M);
        }
        square(b, b.poly, b.gram, b.gram, b.gram, {(float)MUON_C, (float)MUON_B}, stream);
        if (first) {
            begin_kernel<<<blocks_for(squares, 256), 256, 0, stream>>>(b.sum, b.poly, b.R, squares);
        } else {
            square(b, b.next, b.poly, b.sum, b.sum, step, stream);
            std::swap(b.next, b.sum);
        }
        if (i + 1 < MUON_STEPS && i + 1 != RESTART) {
            square(b, b.next, b.poly, b.gram, b.gram, step, stream);
            square(b, b.gram, b.next, b.poly, b.next, step, stream);
        } else {
            matmul_product(product_context(), output(to, b.C), {operand(b.sum, b.R), AS_IS}, x, NULL, {b.R, b.C, b.R}, stream,
                           plain, (int)b.M);
            std::swap(from, to);
        }
    }
}

static Work predict3(const Case& c) { return predict(c, 2, 17, 22); }
static Work predict4(const Case& c) { return predict(c, 4, 14, 22); }

// ---------------------------------------------------------------------------------------------------------------------

static void make(Case& c) {
    const size_t M = c.n[0], R = c.n[1], C = c.n[2], n = M * R * C, X_BYTES = sizeof(floatX);
    c.tensor<float>("u", READ, M * R, C);
    c.tensor<floatX>("x", WRITE, M * R, C, 1, INFINITY).units = 8;  // a step can make an error 3.4 times as large
    c.tensor<char>("room", SCRATCH, 1, n * (4 + X_BYTES) + 4 * M * R * R * X_BYTES + M * MUON_SUMS * sizeof(double), -1);
    c.bytes = (double)(n * (4 + X_BYTES));
    c.flops = (double)M * muon_flops(R, C);
}
static void oracle(Case& c) {
    const size_t M = c.n[0], R = c.n[1], C = c.n[2];
    std::vector<char> scratch(muon_scratch(R, C, sizeof(float), 1).end + matmul_scratch());
    c.tensors[X].host = c.tensors[U].start;
    for (size_t i = 0; i < M; i++) { muon_orthogonalize(c[X] + i * R * C, R, C, scratch.data()); }
}

#include "dev/cuda/main.cuh"

int main(int argc, char** argv) {
    const Ladder o("orthogonalize", "M,R,C", make, NULL, oracle,
                   {{{3, 32, 72}}, {{2, 64, 136}}, {{1, 256 * CLUSTER_BLOCKS, 256 * CLUSTER_BLOCKS + 64}}}, {{{12, 768, 2048}}},
                   {{{16, 2048, 8192}}},
                   {{0, "all matrices of a shape in a launch", REFERENCE, trainer<true>, predict0},
                    {1, "a matrix after the other", 0, trainer<false>, predict1},
                    {2, "all, symmetric products by half", BOLD | SM90 | ONLY_16, trainer<true, true>, predict2},
                    {3, "the Gram form: square products", 0, gram_form<0>, predict3},
                    {4, "the Gram form, begun again before step 3", 0, gram_form<2>, predict4}});
    return zoo(argc, argv, "muon", {o});
}
