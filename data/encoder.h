// The two passes over the documents that make a data set: words for a vocabulary, then ids into shards. Encoding runs
// in parallel; what is written is in the order of the documents and does not depend on the number of threads.
#pragma once

#include <string>

#include "data/documents.h"
#include "data/prepare.h"

namespace onescale {

// The bytes of a tokenizer trained on training documents. Throws Error when all documents fall to validation.
std::string train_tokenizer(const PrepareOptions& options, Documents& documents);

// All documents as ids, each to the split that its number draws: DIR/train_000000.bin ..., DIR/val_000000.bin ... Text
// is held a few megabytes at a time.
PrepareSummary encode_documents(const PrepareOptions& options, Documents& documents, const Tokenizer& tokenizer,
                                const std::string& dir);

}  // namespace onescale
