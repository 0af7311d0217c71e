use std::io::Write;

use super::*;

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stdout.log");
    (folder, path)
}

fn append(path: &Path, text: &str) {
    File::options().create(true).append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

/// All that can be read now.
fn all(text: &mut Text, to_the_end: bool) -> String {
    let mut read = Vec::new();
    while let Some(piece) = text.next(to_the_end).unwrap() {
        read.extend(piece);
    }
    String::from_utf8(read).unwrap()
}

#[test]
fn the_last_lines_of_a_file_and_of_those_before_it() {
    let (_folder, path) = folder();
    append(&rotated(&path, 2), "1\n2\n");
    append(&rotated(&path, 1), "3\n4\n");
    append(&path, "5\n6\nhalf");
    let all_of_it = "1\n2\n3\n4\n5\n6\nhalf";
    for (lines, missing) in
        [(0, all_of_it), (1, "1\n2\n3\n4\n5\n6\n"), (3, "1\n2\n3\n4\n"), (4, "1\n2\n3\n"), (6, "1\n")]
    {
        let mut text = Text::of_file(&path, lines, false).unwrap();
        assert_eq!(format!("{missing}{}", all(&mut text, true)), all_of_it, "{lines} lines");
    }
    assert_eq!(all(&mut Text::of_file(&path, u32::MAX, false).unwrap(), true), all_of_it);
}

#[test]
fn lines_longer_than_a_block_are_found_and_come_in_pieces() {
    let (_folder, path) = folder();
    append(&path, &format!("first\n{}\nlast\n", "x".repeat(CHUNK * 2 + 10)));
    let mut text = Text::of_file(&path, 2, false).unwrap();
    let pieces: Vec<usize> = std::iter::from_fn(|| text.next(true).unwrap()).map(|piece| piece.len()).collect();
    assert_eq!(pieces, [CHUNK, CHUNK, 10 + 1 + 5]);
}

#[test]
fn what_was_there_is_read_and_no_more_unless_one_follows() {
    let (_folder, path) = folder();
    append(&path, "1\n");
    let (mut once, mut following) = (Text::of_file(&path, 9, false).unwrap(), Text::of_file(&path, 0, true).unwrap());
    append(&path, "2\n3");
    assert_eq!(all(&mut once, false), "1\n");
    assert_eq!(following.next(false).unwrap().unwrap(), b"2\n", "the next line is not at its end");
    append(&path, "3\n");
    assert_eq!(all(&mut following, false), "33\n");
}

#[test]
fn who_follows_a_file_follows_its_rotation() {
    let (_folder, path) = folder();
    append(&path, "1\n");
    let mut text = Text::of_file(&path, 9, true).unwrap();
    append(&path, "2\n");
    fs::rename(&path, rotated(&path, 1)).unwrap();
    append(&path, "3\n");
    assert_eq!(all(&mut text, false), "1\n2\n3\n");
    append(&path, "4\n");
    assert_eq!(all(&mut text, false), "4\n");
}

#[test]
fn a_file_that_cannot_be_read_says_so_once() {
    let (folder, _) = folder();
    // A directory can be opened, and not be read.
    let files = [File::open(folder.path()).unwrap()].into();
    let mut text = Text::new(Origin::Files(files, folder.path().into()), 9, true);
    assert!(text.next(false).is_err());
    assert_eq!(text.next(false).unwrap(), None);
}

#[test]
fn the_last_lines_in_memory() {
    let ring = Ring::default();
    ring.append(b"1\n2\n3\n");
    for (lines, expected) in [(0, ""), (1, "3\n"), (2, "2\n3\n"), (9, "1\n2\n3\n")] {
        assert_eq!(all(&mut Text::of_memory(&ring, lines, false), true), expected);
    }
    let mut text = Text::of_memory(&ring, 1, true);
    ring.append(b"4\n");
    assert_eq!(all(&mut text, false), "3\n4\n");
}
