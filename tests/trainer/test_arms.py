"""Arms are data: what each is compared with, and how a changed one is named."""
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.drafter.config import FULL, SLIDING, shape_for
from common.errors import UserError
from trainer import arms_screen, config
from trainer.arms import ARMS, FIELDS, MOST_NAME, changed, choices, differences, named, overridden

ON_THE_WIRE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,31}")


def test_each_arm_differs_from_the_one_it_is_compared_with_in_what_it_asks_about():
    parted = {name: set(differences(arm, ARMS[arm.beside])) for name, arm in ARMS.items()}
    assert parted == {"ce_causal": {"attention"}, "ce_bidi": {"attention"}, "ce_mixed_full": {"attention"}, "kl_causal": {"loss"},
                      "kl_mixed_full": {"loss"}, "kl_mixed_uniform": {"corruption"}, "vp_mixed": {"corruption"}, "lk_mixed": {"loss"},
                      "dpace_causal_swa": {"weights", "all_sliding"}}
    assert all(ON_THE_WIRE.fullmatch(f"{name}-s{2 ** 31 - 1}") for name in ARMS)


def test_a_change_makes_an_arm_of_its_own_compared_with_its_base():
    made = changed(ARMS["ce_causal"], weights="uniform", gamma=None)
    assert (made.name, made.beside, made.weights, made.loss) == ("ce_causal.w-uniform", "ce_causal", "uniform", "ce")
    assert "--weights uniform" in made.question and set(differences(made, ARMS["ce_causal"])) == {"weights"}
    assert changed(ARMS["ce_causal"], block_size=4).name == "ce_causal.block-4"
    assert changed(ARMS["kl_causal"], gamma=4.5).name == "kl_causal.gamma-4.5"
    assert changed(ARMS["ce_bidi"], draft_vocab=64, loss="tv").name == "ce_bidi.loss-tv.vocab-64"
    long = changed(ARMS["ce_bidi"], draft_vocab=256, loss="rkl", all_sliding=True)
    assert re.fullmatch(r"ce_bidi\.[0-9a-f]{6}", long.name) and "--loss rkl, --all-sliding, --draft-vocab 256" in long.question


def test_a_change_that_gives_a_known_arm_is_that_arm_and_none_is_the_base():
    assert changed(ARMS["ce_causal"], loss="kl") is ARMS["kl_causal"]
    assert changed(ARMS["ce_causal"], weights="dpace", all_sliding=True) is ARMS["dpace_causal_swa"]
    assert changed(ARMS["lk_mixed"], loss=None) is ARMS["lk_mixed"] is changed(ARMS["lk_mixed"], attention="mixed")


values = {"loss": st.sampled_from(choices("loss")), "attention": st.sampled_from(choices("attention")), "corruption": st.sampled_from(choices("corruption")),
          "weights": st.just("exp"), "gamma": st.floats(0.01, 99), "all_sliding": st.booleans(), "draft_vocab": st.integers(2, 10 ** 6),
          "block_size": st.integers(2, 64)}


@given(st.sampled_from(sorted(ARMS)), st.fixed_dictionaries({}, optional=values), st.fixed_dictionaries({}, optional=values))
def test_names_are_legal_on_the_wire_and_tell_arms_apart(base, one, two):
    made = []
    for fields in (one, two):
        try:
            made.append(changed(ARMS[base], **fields))
        except UserError as error:
            assert "gamma" in fields and "--gamma is of --weights exp" in str(error)
            return
    a, b = made
    assert ON_THE_WIRE.fullmatch(f"{a.name}-s123456") and len(a.name) <= MOST_NAME
    assert (a.name == b.name) == (not differences(a, b))


@pytest.mark.parametrize("fields, says", [
    ({"loss": "mse"}, "--loss mse: choose ce, ce_argmax, kl"), ({"attention": "full"}, "--attention full: choose causal, bidi, mixed"),
    ({"corruption": "none"}, "--corruption none: choose"), ({"weights": "linear"}, "--weights linear: choose exp, uniform, dpace"),
    ({"gamma": 0.0}, "--gamma 0.0: "), ({"gamma": float("nan")}, "--gamma nan: "), ({"gamma": 3.0, "weights": "uniform"}, "--gamma is of --weights exp"),
    ({"alpha": 0.2}, "--alpha is of --weights dpace"), ({"alpha": 2.0, "weights": "dpace"}, "--alpha 2.0: from 0 to 1"),
    ({"draft_vocab": 1}, "--draft-vocab 1: at least 2"), ({"block_size": 1}, "--block-size 1: at least 2")])
def test_what_cannot_be_is_refused_in_one_line(fields, says):
    with pytest.raises(UserError) as error:
        changed(ARMS["ce_causal"], **fields)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_arm_is_refused_with_the_list():
    with pytest.raises(UserError, match="ce_causal, ce_bidi, .*dpace_causal_swa"):
        named("ce_casual")


def test_every_field_is_an_option_of_hstrain_run():
    assert overridden("vp_mixed", config.Run()) is ARMS["vp_mixed"]
    made = overridden("ce_causal", config.Run(loss="tv", attention="bidi", corruption="uniform", gamma=3.0, draft_vocab=64, all_sliding=True, block_size=8))
    assert [getattr(made, name) for name in FIELDS] == ["tv", "bidi", "uniform", "exp", 3.0, 0.5, True, 64, 8]


def test_the_table_says_of_each_arm_what_it_asks_and_what_it_is_compared_with(capsys):
    arms_screen.show()
    said = " ".join(capsys.readouterr().out.split())
    assert all(name in said for name in ARMS) and "speculators' default" in said
    assert arms_screen.which_has(ARMS["dpace_causal_swa"]) == "--weights exp --no-all-sliding"
    assert arms_screen.which_has(ARMS["kl_mixed_uniform"]) == "--corruption full"


def test_all_sliding_reaches_the_last_layer():
    kinds = [shape_for(64, 300, 8, (1, 3), 299, "causal", all_sliding=every, num_hidden_layers=3).layer_types for every in (False, True)]
    assert kinds == [(SLIDING, SLIDING, FULL), (SLIDING,) * 3]
