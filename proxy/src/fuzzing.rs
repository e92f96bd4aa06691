//! What a fuzzer runs: functions that take any bytes whatever, hand them to one parser or decision, and panic where what
//! comes of it breaks a promise. `cargo xtask fuzz` runs them on bytes that a fuzzer thinks of, the tests here on those that
//! are kept in `tests/fuzz/corpus`.

use crate::{ca, identity};

/// One of them.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// By which it is asked for, and its folder of inputs is known.
    pub name: &'static str,
    /// Takes an input.
    pub run: fn(&[u8]),
}

/// All of them.
pub const TARGETS: [Target; 9] = [
    target("spiffe_id", identity::fuzz::spiffe_id),
    target("answer", identity::fuzz::answer),
    target("peer_chain", identity::fuzz::peer_chain),
    target("bundle", identity::fuzz::bundle),
    target("distrust", identity::fuzz::distrust),
    target("crl", identity::fuzz::crl),
    target("csr", ca::fuzz::csr),
    target("token", ca::fuzz::token),
    target("jwks", ca::fuzz::jwks),
];

const fn target(name: &'static str, run: fn(&[u8])) -> Target {
    Target { name, run }
}

/// Cuts an input into pieces, each of which has its length before it, in two bytes of network order. The last may be shorter
/// than that says.
pub(crate) fn pieces(mut data: &[u8]) -> Vec<&[u8]> {
    let mut pieces = Vec::new();
    while let Some((length, rest)) = data.split_first_chunk::<2>() {
        let length = usize::from(u16::from_be_bytes(*length)).min(rest.len());
        let (piece, after) = rest.split_at(length);
        pieces.push(piece);
        data = after;
    }
    pieces
}

#[cfg(test)]
mod seeds;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_kept_input_holds() {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus");
        for Target { name, run } in TARGETS {
            let folder = corpus.join(name);
            let inputs = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
            let mut count = 0;
            for input in inputs {
                run(&fs::read(input.unwrap().path()).unwrap());
                count += 1;
            }
            assert!(count > 0, "{} is empty", folder.display());
        }
    }

    #[test]
    fn an_input_is_cut_by_the_lengths_in_it() {
        assert_eq!(pieces(&[0, 1, 7, 0, 2, 8, 9]), [&[7][..], &[8, 9]]);
        assert_eq!(pieces(&[0, 9, 7]), [[7]]);
        assert_eq!(pieces(&[0]), [[0; 0]; 0]);
    }
}
