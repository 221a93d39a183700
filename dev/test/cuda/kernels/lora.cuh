/* lora.cuh -- tests of adapters. */
#ifndef TEST_KERNELS_LORA_CUH
#define TEST_KERNELS_LORA_CUH

#include "llmc/lora.cuh"
#include "matmul.cuh"

/* Checks |got - want| <= 1e-5 of the largest element; in 16 bits 2 %: t and dt are rounded on the way. */
static void compare_loosely(const char* what, const Floats& got, const Floats& want) {
    const float limit = sizeof(floatX) == 4 ? 1e-5f : 0.02f;
    float largest = 0, worst = 0;
    for (float w : want) { largest = fmaxf(largest, fabsf(w)); }
    for (size_t i = 0; i < want.size(); i++) {
        const float error = fabsf(got[i] - want[i]);
        if (!(error <= worst) && !isnan(worst)) { worst = error; }  // a NaN stays
    }
    CHECK(worst <= limit * largest, "%s: off by %g, the largest element is %g", what, (double)worst, (double)largest);
}

static void lora_agrees_with_its_oracle() {
    const LoraConfig cases[] = {{8, 16, 0x7f}, {3, 1.5, 0x05}, {16, 16, 0x6a}};  // all; q, v; k, o, up, down
    const size_t N = 150;
    MatmulContext* ctx = matmul_context();
    ModelConfig c;
    memset(&c, 0, sizeof c);
    c.hidden_size = 72, c.intermediate_size = 136, c.num_layers = 2, c.num_heads = 4, c.num_kv_heads = 2, c.head_dim = 16;
    for (const LoraConfig& lora : cases) {
        c.lora = lora;
        ParamTable table = trained_table(&c);
        const size_t elements = table.elements;
        for (int i = 0; i < BLOCK_LINEARS; i++) {
            const Lora l = lora_at(&c, &table, (LinearKind)i, 1);
            if (l.parts == 0) { continue; }
            const LoraPitch pitch = lora_pitch(&l);
            const size_t C = (size_t)l.C, OC = (size_t)l.OC, R = (size_t)(l.parts * l.r);
            const Floats x = random_values<floatX>(N * C, 1), w = random_values<floatX>(elements, 0.3f);
            const Floats dy = random_values<floatX>(N * OC, 1), y0 = random_values<floatX>(N * OC, 1);
            const Floats dx0 = random_values<floatX>(N * C, 1), dw0 = random_values<float>(elements, 1);
            Floats y = y0, dx = dx0, dw = dw0, t(N * R), dt(N * R);
            const LoraMemory memory = {w.data(), dw.data(), t.data(), dt.data()};
            lora_forward_plain(y.data(), &memory, x.data(), &l, N);
            lora_backward_plain(dx.data(), &memory, dy.data(), x.data(), &l, N);
            floatX *d_x = upload_rows<floatX>(x, N, C, pitch.x), *d_w = upload_rows<floatX>(w, 1, elements, elements);
            floatX *d_dy = upload_rows<floatX>(dy, N, OC, pitch.y), *d_y = upload_rows<floatX>(y0, N, OC, pitch.y);
            floatX *d_dx = upload_rows<floatX>(dx0, N, C, pitch.x), *d_t = device_alloc<floatX>(N * pitch.t);
            floatX* d_dt = device_alloc<floatX>(N * pitch.t);
            float* d_dw = upload(dw0);
            const LoraMemoryX m = {d_w, output(d_dw, 0), d_t, d_dt};
            lora_forward_cuda(ctx, d_y, m, d_x, &l, N, 0);
            lora_backward_input_cuda(ctx, d_dx, m, d_dy, &l, N, 0);
            lora_backward_weight_cuda(ctx, m, d_dy, d_x, &l, N, true, 0);
            compare_loosely("t", download_rows(d_t, N, R, pitch.t), t);
            compare_loosely("y", download_rows(d_y, N, OC, pitch.y), y);
            compare_loosely("dt", download_rows(d_dt, N, R, pitch.t), dt);
            compare_loosely("dx", download_rows(d_dx, N, C, pitch.x), dx);
            compare_loosely("dw", download(d_dw, elements), dw);
        }
        param_table_free(&table);
    }
    matmul_destroy(ctx);
    device_free_all();
}

#endif
