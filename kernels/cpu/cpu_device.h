// The CPU implementation of the kernel contract; what each operation does is said in kernels/device.h. The operations
// live in one file a family: memory, copy, peak, random, rows, layernorm, linear, gelu, attention, cross_entropy,
// reduce, optimizer.
#pragma once

#include "kernels/cpu/product.h"
#include "kernels/device.h"

namespace onescale::cpu::inline ONESCALE_ISA {

class CpuDevice final : public Device {
 public:
  CpuDevice(int threads, bool dry);

  std::string describe() const override;
  Tensor allocate(Kind kind, DType dtype, std::initializer_list<std::int64_t> shape) override;
  std::array<std::int64_t, kind_count> memory() const override { return memory_; }
  void reserve_scratch(std::int64_t bytes) override;
  void upload(Tensor dst, const void* src) override;
  void download(void* dst, Tensor src) override;
  void after_each(std::function<void()> hook) override { after_each_ = std::move(hook); }
  void trace(std::function<void(const Operation&)> event) override { trace_ = std::move(event); }
  double peak_flops(DType dtype) override;
  double peak_bandwidth() override;

  void fill(Tensor dst, float value) override;
  void copy(Tensor dst, Tensor src) override;
  void random_normal(Tensor dst, std::uint64_t seed, std::int64_t tensor, std::int64_t first, float stddev) override;

  void gather_rows(Tensor out, Tensor table, Tensor index, std::int64_t first_row) override;
  void gather_rows_backward(Tensor dtable, Tensor dout, Tensor index, std::int64_t first_row, Write write) override;
  void scatter_rows(Tensor out, Tensor rows, Tensor index) override;
  void add_positions(Tensor x, Tensor positions, Tensor wpe, const Dropout& dropout) override;
  void dropout(Tensor x, const Dropout& dropout) override;

  void layernorm(Tensor y, Tensor mean, Tensor rstd, Tensor x, Tensor w, Tensor b, float eps) override;
  void layernorm_backward(Tensor dx, Tensor dw, Tensor db, Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor w,
                          Write write) override;
  void residual_layernorm(Tensor out, Tensor y_norm, Tensor mean, Tensor rstd, Tensor x, Tensor y, Tensor bias,
                          Tensor w, Tensor b, float eps, const Dropout& dropout) override;
  void residual(Tensor out, Tensor x, Tensor y, Tensor bias, const Dropout& dropout) override;
  void residual_backward(Tensor dy, Tensor dbias, Tensor dout, const Dropout& dropout, Write write) override;

  void linear(Tensor y, Tensor x, Tensor W, Tensor b) override;
  void linear_backward(Tensor dx, Tensor dW, Tensor db, Tensor dy, Tensor x, Tensor W, Write write) override;
  void gelu(Tensor y, Tensor x, Gelu kind) override;
  void gelu_backward(Tensor dy, Tensor dbias, Tensor x, Gelu kind, Write write) override;

  void attention(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, float scale, const Visible& visible,
                 const Dropout& dropout) override;
  void attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor do_, Tensor o, Tensor lse, Tensor q, Tensor k,
                          Tensor v, float scale, const Visible& visible, const Dropout& dropout) override;

  void softmax_statistics(Tensor stats, Tensor logits, Tensor labels, std::int64_t first_row,
                          std::int64_t rows) override;
  void cross_entropy(Tensor loss, Tensor logits, Tensor stats, Tensor labels, std::int64_t first_row, std::int64_t rows,
                     float weight) override;
  void combine_statistics(Tensor stats, Tensor parts) override;
  void sum_pieces(Tensor out, const std::vector<Tensor>& pieces, Write write) override;
  void sum(Tensor out, Tensor x, Write write) override;
  void sum_of_squares(Tensor out, Tensor x, Write write) override;
  void adamw(Tensor w, Tensor m, Tensor v, Tensor g, Tensor compute, const AdamW& settings) override;
  void sgd(Tensor w, Tensor g, Tensor compute, float lr, float weight_decay, float scale) override;

 private:
  // One running operation: says what it did when it ends, hands out its scratch. An operation is written as
  //   Run run(*this, "layernorm", flops, bytes, scratch_bytes);
  //   if (!run) return;  // dry
  class Run {
   public:
    struct Amount {
      double value;
      template <class Number>
      Amount(Number n) : value(static_cast<double>(n)) {}
    };
    Run(CpuDevice& device, const char* name, Amount flops, Amount bytes, std::int64_t scratch_bytes = 0);
    ~Run();
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    explicit operator bool() const { return !device_.dry_; }
    template <class T = char>
    T* scratch() const {  // 64-byte aligned
      return reinterpret_cast<T*>(device_.scratch_);
    }

   private:
    CpuDevice& device_;
    Operation operation_;
  };

  char* take(std::int64_t bytes);  // from the machine, until the device is destroyed

  int threads_;
  bool dry_;
  Bf16 bf16_ = fastest_bf16();
  bool reserved_ = false;  // before reserve_scratch() scratch grows as needed
  char* scratch_ = nullptr;
  std::int64_t scratch_bytes_ = 0;
  std::array<std::int64_t, kind_count> memory_{};
  std::function<void()> after_each_;
  std::function<void(const Operation&)> trace_;
  std::vector<std::unique_ptr<void, void (*)(void*)>> blocks_;  // what take() took
};

}  // namespace onescale::cpu::inline ONESCALE_ISA
