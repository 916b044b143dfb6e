"""The doctor's report is complete and made of text."""

from minitext.cli.doctor import examine


def test_it_names_the_machine_and_what_it_can_do():
    facts = examine()
    assert {"python", "devices", "matmul peak (f32)", "memory", "compile for TPU", "jax"} <= set(
        facts
    )
    assert all(isinstance(value, str) and value for value in facts.values())
    assert facts["devices"].startswith("8 x cpu")
