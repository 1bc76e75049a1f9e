// The tables of `onescale verify`, one a reported fault of other trainers: our figure, measured now, beside the faulty
// one.
#pragma once

#include <map>
#include <optional>

#include "train/verify.h"

namespace onescale {

// Every rank of `world` makes the same calls; rank 0 prints. Layouts of fewer ranks run on the first ones.
class VerifyTables {
 public:
  VerifyTables(const Options& options, Communicator& world);

  // The case's gradient in every layout, stage, reduction and sp_mode that fits, or in those that the options give.
  void gradients(const VerifyCase& c);
  // The reported faults, on small models of their own.
  void faults();

  // A sentence for each row whose figure is off; of rank 0.
  const std::vector<std::string>& off() const { return off_; }
  int lacking() const { return lacking_; }  // rows that need more ranks

 private:
  struct Shape {
    Layout layout;
    SpMode mode;
    std::string text() const;
  };
  std::vector<Shape> shapes(const VerifyCase& c, bool only_given);
  Communicator* group(int size);  // the first `size` ranks; nullptr on the others
  bool enough(int ranks) const { return ranks <= world_.size(); }

  Measured step(Layout layout, const VerifyCase& c, const StepSettings& s, int steps = 1, double lr = verify_lr);
  Measured alone(const VerifyCase& c, const StepSettings& s, int steps = 1, double lr = verify_lr);

  void title(const char* what, const char* theirs);
  void row(const std::string& what, const std::string& ours, const std::string& theirs);
  // The figure as text; off where it is farther than `tolerance` from `right`.
  std::string figure(const std::string& what, double value, double right, double tolerance, int digits = 4);
  std::string judged(const std::string& what, const VerifyCase& c, const Measured& m, const Measured& exact,
                     double right = 1, DType dtype = DType::float32);
  // Weights' ratio / vectors' ratio and the error, the worst of all stages; "needs N ranks".
  std::string stages(const std::string& what, const Layout& layout, const VerifyCase& c, const StepSettings& s,
                     double right = 1);
  std::string needs(int ranks);
  std::vector<double> known_norm(Layout layout, const ZeroSettings& zero);

  void absolute();
  void small_buckets();
  void unequal_tokens();
  void accumulation();
  void clipping();
  void tensor_parallel();
  void dividing_by_sp();
  void everything_else();

  Options options_, plain_;  // as given; and with the defaults of a verification
  Communicator& world_;
  std::map<int, std::unique_ptr<Communicator>> groups_;
  VerifyCase small_;
  const VerifyCase* user_ = nullptr;  // whose steps take the options' threads
  std::vector<std::string> off_;
  int lacking_ = 0, table_ = 0;
};

}  // namespace onescale
