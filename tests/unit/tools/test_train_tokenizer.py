import pytest

from megatron.wlb.preprocess_sentencepiece import SentencePieceConfig, train_sentencepiece


@pytest.fixture
def corpus(write_lines, text_folder, tmp_path):
    return write_lines(tmp_path / "in.jsonl", [{"text": f.read_text()} for f in sorted(text_folder.iterdir())])


def test_the_model_follows_input_and_seed(corpus, tmp_path):
    def train(name, **changes):
        config = SentencePieceConfig(inputs=(corpus,), model=tmp_path / f"{name}.model", vocab_size=300, **changes)
        assert train_sentencepiece(config) == 300
        return (tmp_path / f"{name}.model").read_bytes()

    small = {"sample_bytes": 8192}  # two excerpts of about twelve: another seed takes others
    assert train("a", **small) == train("b", **small)
    assert train("a", **small) != train("c", **small, seed=2)
    vocabulary = (tmp_path / "a.vocab").read_text(encoding="utf-8")
    assert vocabulary.startswith("<unk>\t0\n<s>\t0\n</s>\t0\n")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("--vocab-size", "200"), "the tokenizer cannot be trained with --vocab-size 200: "),
        (("--vocab-size", "9000", "--model-type", "unigram"), "the tokenizer cannot be trained with --vocab-size 9000"),
        (("--vocab-size", "0"), "vocab_size must be >= 1, got 0"),
        (("--vocab-size", "300", "--json-key", "body"), "in.jsonl:1: key 'body' is missing"),
    ],
)
def test_errors_leave_no_file(run, corpus, tmp_path, capsys, argv, sentence):
    assert run("train_tokenizer", "--input", corpus, "--model-prefix", tmp_path / "m", *argv) == 1
    assert sentence in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]
