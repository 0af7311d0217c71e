//! The program that this process runs, so that ranks can tell whether all run the same.

use std::fs::File;
use std::io::{self, Read};
use std::sync::OnceLock;

/// CRC-32C of this process's executable file; 0 where it cannot be read. It is read once.
pub(crate) fn checksum() -> u64 {
    static CHECKSUM: OnceLock<u64> = OnceLock::new();
    *CHECKSUM.get_or_init(|| File::open("/proc/self/exe").and_then(of).map_or(0, u64::from))
}

fn of(mut file: impl Read) -> io::Result<u32> {
    let (mut sum, mut buffer) = (0, vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum),
            read => sum = crc32c::crc32c_append(sum, &buffer[..read]),
        }
    }
}

/// The ranks that run something else than rank 0, where both are known.
pub(crate) fn others(programs: &[u64]) -> Vec<usize> {
    let known = |program: &&u64| **program != 0;
    let Some(first) = programs.first().filter(known) else { return Vec::new() };
    let differs = |(_, program): &(usize, &u64)| **program != 0 && *program != first;
    programs.iter().enumerate().filter(differs).map(|(rank, _)| rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_files_have_equal_checksums_and_this_program_has_one() {
        let long = vec![7; 200_000];
        assert_eq!(of(&long[..]).unwrap(), crc32c::crc32c(&long));
        assert_eq!(checksum(), u64::from(crc32c::crc32c(&std::fs::read("/proc/self/exe").unwrap())));
    }

    #[test]
    fn who_runs_another_program_is_named_and_who_does_not_know_is_not() {
        assert_eq!(others(&[5, 5, 0, 6, 5, 7]), [3, 5]);
        assert!(others(&[0, 1, 2]).is_empty() && others(&[]).is_empty());
    }
}
