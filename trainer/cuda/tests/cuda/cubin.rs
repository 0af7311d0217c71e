//! What NVRTC's code for a GPU tells of its kernels: the ELF sections of a cubin.

use std::collections::HashMap;

/// What a kernel takes from its GPU.
#[derive(Debug)]
pub(crate) struct Usage {
    /// Bytes of local memory of a thread: arrays that are no registers, and registers that did not fit.
    pub(crate) local: u32,
    /// Instructions of tensor cores (`HMMA`).
    pub(crate) tensor_cores: usize,
}

/// In `.nv.info`: values of four bytes for a symbol, and of these, the size of a kernel's frame.
const FOR_A_SYMBOL: u8 = 4;
const FRAME_SIZE: u8 = 0x11;
/// Bytes of an instruction; its lowest twelve bits name what it does.
const INSTRUCTION: usize = 16;
const HMMA: u64 = 0x23c;

fn number(bytes: &[u8], place: usize, size: usize) -> u64 {
    bytes[place..place + size].iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

fn text(bytes: &[u8], place: usize) -> &str {
    let length = bytes[place..].iter().position(|&byte| byte == 0).unwrap();
    std::str::from_utf8(&bytes[place..place + length]).unwrap()
}

/// By name: where a section begins in the file, and its bytes.
fn sections(code: &[u8]) -> HashMap<&str, (usize, usize)> {
    let (first, size) = (number(code, 0x28, 8) as usize, number(code, 0x3a, 2) as usize);
    let headers: Vec<&[u8]> = code[first..].chunks(size).take(number(code, 0x3c, 2) as usize).collect();
    let place = |header: &[u8]| (number(header, 0x18, 8) as usize, number(header, 0x20, 8) as usize);
    let names = place(headers[number(code, 0x3e, 2) as usize]).0;
    headers.iter().map(|&header| (text(code, names + number(header, 0, 4) as usize), place(header))).collect()
}

/// By name of a kernel: what it takes.
pub(crate) fn usage(code: &[u8]) -> HashMap<String, Usage> {
    let sections = sections(code);
    let (symbols, names) = (sections[".symtab"].0, sections[".strtab"].0);
    let (mut place, bytes) = sections[".nv.info"];
    let (end, mut frames) = (place + bytes, HashMap::new());
    while place < end {
        let (format, attribute, size) = (code[place], code[place + 1], number(code, place + 2, 2) as usize);
        if (format, attribute) == (FOR_A_SYMBOL, FRAME_SIZE) {
            let symbol = symbols + 24 * number(code, place + 4, 4) as usize;
            let name = text(code, names + number(code, symbol, 4) as usize);
            frames.insert(name, number(code, place + 8, 4) as u32);
        }
        // The other formats hold their value where this one holds a size.
        place += 4 + if format == FOR_A_SYMBOL { size } else { 0 };
    }
    let kernels = sections.iter().filter_map(|(name, place)| Some((name.strip_prefix(".text.")?, place)));
    kernels
        .map(|(name, &(first, bytes))| {
            let instructions = code[first..first + bytes].chunks(INSTRUCTION);
            let tensor_cores = instructions.filter(|bytes| number(bytes, 0, 8) & 0xfff == HMMA).count();
            (name.to_owned(), Usage { local: frames[name], tensor_cores })
        })
        .collect()
}
