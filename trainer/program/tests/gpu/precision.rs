//! Training with products of numbers that are rounded to bf16, on the double of the driver.

use crate::training::{GPT, SHORT, checksum, losses, printed, refused, refused_by_rank_0, run, together};

#[test]
fn a_perceptron_learns_in_bf16_and_every_number_of_workers_gives_the_same_bits() {
    let flags = "digits --epochs 4 --hidden 32 --batch 60 --shards 2 --lr 0.005 --device cuda:0";
    let narrow = format!("{flags} --precision bf16");
    let alone = printed(&narrow, "");
    let accuracy = alone.lines().find_map(|line| line.strip_prefix("test accuracy ")).unwrap();
    let accuracy: f64 = accuracy.split_whitespace().next().unwrap().parse().unwrap();
    assert!(accuracy > 0.85, "{alone}");
    assert_eq!(checksum(&together(&narrow, 2)), checksum(&alone));
    assert_ne!(checksum(&printed(flags, "")), checksum(&alone), "in f32");
}

#[test]
fn a_gpt_learns_in_bf16_what_it_learns_in_f32_and_the_same_bits_for_every_number_of_workers() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |precision: &str| {
        let trace = folder.path().join(precision);
        printed(&format!("{GPT} --device cuda:0 --precision {precision} --trace {}", trace.display()), "");
        losses(&trace)
    };
    let (narrow, plain) = (losses("bf16"), losses("f32"));
    assert!(narrow.len() == 4 && narrow != plain, "{narrow:?} {plain:?}");
    assert!(narrow.iter().zip(&plain).all(|(narrow, plain)| (narrow - plain).abs() < 0.01 * plain));

    let flags = format!("{GPT} --device cuda:0 --precision bf16");
    let alone = printed(&flags, "");
    assert_eq!(checksum(&together(&flags, 2)), checksum(&alone), "2 workers");
    assert_eq!(checksum(&printed(&flags, "backwards=1")), checksum(&alone), "last threads first");
}

#[test]
fn a_library_that_refuses_epilogues_is_followed_by_kernels_and_a_line_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let losses = |how: &str| {
        let trace = folder.path().join(format!("trace-{how}"));
        let flags = format!("{GPT} --device cuda:0 --precision bf16 --trace {}", trace.display());
        let (well, _, logged) = run(&flags, how);
        assert!(well, "{logged}");
        (losses(&trace), logged.lines().filter(|line| line.contains("WARN")).map(str::to_owned).collect::<Vec<_>>())
    };
    let ((by_library, none), (by_kernels, said)) = (losses(""), losses("epilogues=0"));
    assert!(none.is_empty(), "{none:?}");
    assert!(by_kernels != by_library, "{by_kernels:?} {by_library:?}");
    assert!(by_kernels.iter().zip(&by_library).all(|(one, other)| (one - other).abs() < 0.01 * other));
    // One line for each epilogue, whatever the shapes.
    for what in ["with a bias;", "with a bias and GELU;", "with GELU's derivative;"] {
        assert_eq!(said.iter().filter(|line| line.contains(what)).count(), 1, "{said:?}");
    }
    assert_eq!(said.len(), 3, "{said:?}");
}

#[test]
fn only_a_gpu_computes_in_bf16() {
    let flags = format!("{SHORT} --precision bf16");
    for (device, how, why) in [
        ("cpu", "", "CPUs compute only in f32"),
        ("auto", "devices=0", "shows no GPU"),
        ("cuda", "devices=0", "shows no GPU"),
    ] {
        let error = refused(&format!("{flags} --device {device}"), how);
        let said = format!("cannot use --device {device} --precision bf16: ");
        let remedy = "--precision f32 and --device auto uses the CPU then";
        assert!(error.contains(&said) && error.contains(why) && error.contains(remedy), "{error}");
    }
}

#[test]
fn workers_of_another_precision_refuse_one_another() {
    let logged = refused_by_rank_0("--device cuda:0", "--device cuda:0 --precision bf16", "devices=1");
    assert!(logged.contains("--precision bf16"), "{logged}");
}
