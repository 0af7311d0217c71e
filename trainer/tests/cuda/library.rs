//! Products by cuBLASLt, which is its double here: where it is taken, and what is said where it is not. Its numbers are
//! looked at in `kernels` and `precision`.

use std::os::unix::fs::symlink;
use std::process::Output;

use crate::double::{driver, folders};
use crate::training::{SHORT, checksum, command, ended, printed};

fn flags() -> String {
    format!("{SHORT} --device cuda:0")
}

/// A run with libraries in these folders, and what it says of products.
fn run(folders: &str, how: &str) -> (String, String) {
    let output: Output = command(&flags(), how).env("ELASTIC_CUDA_LIBRARIES", folders).output().unwrap();
    let (well, printed, logged) = ended(output);
    assert!(well, "{logged}");
    let warnings: Vec<&str> = logged.lines().filter(|line| line.contains("WARN")).collect();
    assert!(warnings.len() <= 1, "{logged}");
    (checksum(&printed).to_owned(), warnings.concat())
}

#[test]
fn it_multiplies_where_it_will_do_and_else_the_own_kernel_does() {
    let (by_library, said) = run(&folders(), "");
    assert_eq!(said, "");
    let own = "products are computed by the trainer's own kernel, which is slower: ";
    // Something else under its name, as an old one has fewer functions
    let folder = tempfile::tempdir().unwrap();
    symlink(driver().join("libcuda.so.1"), folder.path().join("libcublasLt.so.13")).unwrap();
    let (by_kernel, said) = run(&format!("{}:{}", driver().display(), folder.path().display()), "");
    assert!(said.contains(own) && said.contains("libcublasLt.so.13 has no cublasLtCreate: it is too old"), "{said}");
    assert!(said.contains("pip install --upgrade nvidia-cublas"), "{said}");
    // The double sums in another order.
    assert_ne!(by_library, by_kernel);
    let (sum, said) = run(&folders(), "cublaslt=0");
    assert!(sum == by_kernel && said.contains(own), "{said}");
    assert!(
        said.contains("GPU 0 failed to start cuBLASLt: cuBLASLt's error 1, CUBLAS_STATUS_NOT_INITIALIZED"),
        "{said}"
    );
    // It starts, and has a way to no product.
    let (sum, said) = run(&folders(), "ways=0");
    assert!(sum == by_kernel && said.contains("cuBLASLt has no way to a product of"), "{said}");
    // There is none.
    let (sum, said) = run(&driver().display().to_string(), "");
    let elsewhere = said.is_empty() || !said.contains("is not to be found");
    assert!(
        elsewhere || sum == by_kernel && said.contains(own) && said.contains("pip install nvidia-cublas"),
        "{said}"
    );
}

#[test]
fn it_gives_the_same_bits_with_and_without_graphs() {
    assert_eq!(checksum(&printed(&flags(), "")), checksum(&printed(&flags(), "graphs=0")));
}

#[test]
fn workers_without_it_are_refused_by_those_with_it() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let start = |rank: &str, how: &str| {
        let mut command = command(&flags(), how);
        command.env("RANK", rank).env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.spawn().unwrap()
    };
    let (mut first, second) = (start("0", ""), start("1", "cublaslt=0"));
    let (well, _, logged) = ended(second.wait_with_output().unwrap());
    // It would wait for another.
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(!well && logged.contains("refused by rank 0"), "{logged}");
    assert!(logged.contains("cuBLASLt 13.1.0 on 132 processors") && logged.contains("own products"), "{logged}");
}
