import pytest

from wlb.errors import DataError
from wlb.report.training_log import load_log, parse_iteration, parse_log

LINE = (
    " [2026-01-01 10:00:00.000000] iteration        3/       8 | consumed samples:           12 | elapsed time per "
    "iteration (ms): 1777.2 | learning rate: 2.819134E-03 | global batch size:     4 | lm loss: 8.219001E+00 | "
    "loss scale: 1.0 | number of nan iterations:   0 | waiting tokens: 512 | mean delay (steps): 0.25 |"
)


def test_an_iteration_line_gives_its_step_seconds_loss_and_our_fields():
    step = parse_iteration(LINE)
    assert (step.step, step.num_steps, step.loss) == (2, 8, 8.219001)
    assert step.elapsed_s == pytest.approx(1.7772)
    assert step.fields["waiting tokens"] == 512
    assert step.fields["mean delay (steps)"] == 0.25
    assert step.fields["consumed samples"] == 12


@pytest.mark.parametrize(
    "line",
    [
        "",
        "training ...",
        "[Rank 1] (after 1 iterations) memory (MB) | allocated: 0.00 | max allocated: 956.28",
        " validation loss at iteration 8 | lm loss value: 7.6E+00 | lm loss PPL: 2.0E+03 |",
        "iteration 3/ 8 | consumed samples: 12 |",
    ],
)
def test_other_lines_are_no_iterations(line):
    assert parse_iteration(line) is None


def test_a_skipped_iteration_has_no_loss():
    assert parse_iteration("iteration 1/ 8 | elapsed time per iteration (ms): 10.0 | lm loss: nan? |").loss is None


def test_arguments_give_the_shape_of_the_model():
    arguments = {
        "hidden_size": 64,
        "ffn_hidden_size": 192,
        "num_layers": 4,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "group_query_attention": "False",
        "kv_channels": 32,
        "padded_vocab_size": 2048,
        "swiglu": "True",
    }
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()]
    lines[0] = "[default1]:" + lines[0]
    shape = parse_log("\n".join([*lines, LINE])).shape
    assert shape.num_query_groups == 2  # without grouped queries every head has its own
    # Per layer 2 * (64 * (2 * 64 + 2 * 64) + 3 * 64 * 192) operations a token, output layer 2 * 64 * 2048.
    assert shape.linear_flops_per_token == 4 * 2 * (64 * 256 + 3 * 64 * 192) + 2 * 64 * 2048


def test_grouped_queries_are_read_where_they_are_on():
    text = "\n".join(
        f"  {name} ....... {value}"
        for name, value in (
            ("hidden_size", 8),
            ("ffn_hidden_size", 8),
            ("num_layers", 1),
            ("num_attention_heads", 4),
            ("num_query_groups", 2),
            ("group_query_attention", True),
            ("kv_channels", 2),
            ("padded_vocab_size", 16),
        )
    )
    assert parse_log(text).shape.num_query_groups == 2


def test_the_vocabulary_is_known_only_after_the_tokenizer_was_built():
    lines = [
        "  padded_vocab_size ............................... None",
        "INFO:somewhere: > padded vocab (size: 2000) with 48 dummy tokens (new size: 2048)",
    ]
    assert parse_log("\n".join(lines)).integer("padded_vocab_size") == 2048


def test_a_missing_argument_is_named():
    with pytest.raises(DataError, match="seq_length as a whole number, got None"):
        parse_log(LINE).integer("seq_length")


def test_a_log_without_an_iteration_is_refused(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("training ...\n")
    with pytest.raises(DataError, match="at least one iteration"):
        load_log(path)


def test_a_missing_log_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"log\.txt: cannot be read: No such file"):
        load_log(tmp_path / "log.txt")
