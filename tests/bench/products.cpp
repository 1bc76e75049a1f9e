// Times our products against oneDNN's three forms in one run: for every linear layer of the bench models y = x W^T, dx
// = dy W and dW = dy^T x. Arguments: seconds a product (default 1), "warm" to multiply the same matrices each time (by
// default they lie in main memory, as in a step), and a part of the names to run.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <dnnl.hpp>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cpu/product.h"
#include "kernels/cpu/vec.h"
#include "kernels/device.h"
#include "kernels/error.h"

namespace {

using namespace onescale;
using std::int64_t;

struct Layer {
  const char* model;
  int64_t n;
  const char* name;
  int64_t in, out;
};

std::vector<Layer> layers() {
  std::vector<Layer> all;
  const auto model = [&](const char* name, const std::vector<int64_t>& tokens, int64_t C, int64_t qkv, int64_t V,
                         int64_t chunk) {
    for (const int64_t n : tokens) {
      all.insert(
          all.end(),
          {{name, n, "qkv", C, qkv}, {name, n, "o", C, C}, {name, n, "fc", C, 4 * C}, {name, n, "proj", 4 * C, C}});
    }
    all.push_back({name, chunk, "head", C, V});
  };
  model("124M", {256, 1024}, 768, 2304, 50304, 256);
  model("164M", {512}, 768, 896, 49152, 512);
  model("10M", {2048}, 384, 512, 8192, 512);
  return all;
}

double seconds_of(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// c [M, N] = a b, the operands in the order and strides in which the trainer holds them.
struct Shape {
  const char* name;
  bool a_transposed, b_transposed;
  int64_t M, N, K;
};

dnnl::memory::desc matrix(int64_t rows, int64_t columns, bool transposed) {
  return {{rows, columns},
          dnnl::memory::data_type::f32,
          transposed ? dnnl::memory::dims{1, rows} : dnnl::memory::dims{columns, 1}};
}

}  // namespace

int main(int argc, char** argv) {
  double budget = 1;
  bool warm = false;
  std::string part;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "warm") == 0)
      warm = true;
    else if (std::string(argv[i]).find_first_not_of("0123456789.") == std::string::npos)
      budget = std::atof(argv[i]);
    else
      part = argv[i];
  }
  const std::string isa = cpu::register_bytes == 64 ? "v4" : "v3";
  const auto device = make_cpu_device(0, false, isa);
  const int threads = std::max(1, std::atoi(device->describe().substr(device->describe().rfind(", ") + 2).c_str()));
  std::printf(
      "%s; GFLOP/s, best of as many as fit into %.1f s, operands in %s; peak: ours over the FMA peak between them\n",
      device->describe().c_str(), budget, warm ? "the caches" : "main memory");
  std::printf("%-5s %5s %-5s %-3s %6s %6s %6s %7s %7s %7s %7s %6s %6s\n", "model", "n", "layer", "", "M", "N", "K",
              "ours", "sgemm", "matmul", "packed", "ratio", "peak");
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  double log_ratio = 0, log_rate = 0, log_share = 0, worst = 1e9;
  int count = 0;
  for (const Layer& layer : layers()) {
    for (const Shape& s : {Shape{"y", false, true, layer.n, layer.out, layer.in},
                           Shape{"dx", false, false, layer.n, layer.in, layer.out},
                           Shape{"dW", true, false, layer.out, layer.in, layer.n}}) {
      if ((str(layer.model, " ", layer.n, " ", layer.name, " ", s.name)).find(part) == std::string::npos) continue;
      const int64_t sizes[] = {s.M * s.K, s.K * s.N, s.M * s.N};
      const int64_t copies = warm ? 1 : 1 + (int64_t{1} << 27) / (4 * (sizes[0] + sizes[1] + sizes[2]));
      const auto memory = make_cpu_device(0, false, isa);
      float* base[3];
      for (int i = 0; i < 3; ++i) {
        const Tensor t = memory->allocate(Kind::workspace, DType::float32, {copies * sizes[i]});
        if (i < 2) memory->random_normal(t, 1, i, 0, 1.0f);
        base[i] = t.as<float>();
      }
      cpu::Product product{s.M,
                           s.N,
                           s.K,
                           {nullptr, s.a_transposed ? 1 : s.K, s.a_transposed ? s.M : 1},
                           {nullptr, s.b_transposed ? s.K : 1, s.b_transposed ? 1 : s.N},
                           DType::float32,
                           DType::float32,
                           threads};
      const Tensor scratch = memory->allocate(Kind::kernel_scratch, DType::float32, {product.scratch_bytes() / 4});
      int64_t turn = 0;
      const auto at = [&](int i) { return base[i] + turn % copies * sizes[i]; };

      std::vector<std::function<void()>> forms;
      forms.push_back([&] {
        product.a.data = at(0), product.b.data = at(1);
        product.run(at(2), nullptr, false, scratch.as<char>());
      });
      forms.push_back([&] {
        dnnl_sgemm(s.a_transposed ? 'T' : 'N', s.b_transposed ? 'T' : 'N', s.M, s.N, s.K, 1, at(0),
                   s.a_transposed ? s.M : s.K, at(1), s.b_transposed ? s.K : s.N, 0, at(2), s.N);
      });
      const auto a = matrix(s.M, s.K, s.a_transposed), b = matrix(s.K, s.N, s.b_transposed),
                 c = matrix(s.M, s.N, false);
      const dnnl::memory::desc any({s.K, s.N}, dnnl::memory::data_type::f32, dnnl::memory::format_tag::any);
      for (const bool packed : {false, true}) {
        const dnnl::matmul::primitive_desc found({a, packed ? any : b, c}, engine);
        dnnl::memory weights(found.weights_desc(), engine);
        dnnl::memory plain_b(b, engine, base[1]);
        const dnnl::reorder reorder = packed ? dnnl::reorder(plain_b, weights) : dnnl::reorder();
        forms.push_back([&, packed, matmul = dnnl::matmul(found), weights, plain_b, reorder]() mutable {
          const dnnl::memory A(a, engine, at(0)), C(c, engine, at(2));
          plain_b.set_data_handle(at(1));
          if (packed) reorder.execute(stream, plain_b, weights);
          matmul.execute(stream,
                         {{DNNL_ARG_SRC, A}, {DNNL_ARG_WEIGHTS, packed ? weights : plain_b}, {DNNL_ARG_DST, C}});
        });
      }

      std::vector<double> best(forms.size(), 1e9);
      double peak = 0;
      for (double spent = 0, round = 0; spent < budget || round < 3; ++round) {
        peak = std::max(peak, device->peak_flops(DType::float32) / 1e9);
        for (std::size_t i = 0; i < forms.size(); ++i, ++turn) {
          const double t = seconds_of(forms[i]);
          best[i] = std::min(best[i], t);
          spent += t;
        }
      }
      const double flops = 2e-9 * static_cast<double>(s.M) * static_cast<double>(s.N * s.K);
      const double ratio = *std::min_element(best.begin() + 1, best.end()) / best[0];
      std::printf("%-5s %5ld %-5s %-3s %6ld %6ld %6ld %7.0f %7.0f %7.0f %7.0f %6.3f %6.3f\n", layer.model, layer.n,
                  layer.name, s.name, s.M, s.N, s.K, flops / best[0], flops / best[1], flops / best[2], flops / best[3],
                  ratio, flops / best[0] / peak);
      std::fflush(stdout);
      log_ratio += std::log(ratio);
      log_rate += std::log(flops / best[0]);
      log_share += std::log(flops / best[0] / peak);
      worst = std::min(worst, ratio);
      ++count;
    }
  }
  if (count > 0) {
    std::printf(
        "against the best form of oneDNN: geometric mean %.3f, smallest %.3f; ours: geometric mean %.0f GFLOP/s, %.3f "
        "of the peak\n",
        std::exp(log_ratio / count), worst, std::exp(log_rate / count), std::exp(log_share / count));
  }
}
