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

    /// How many changed inputs each target is tried on.
    const CHANGED: usize = 3_000;

    fn kept(target: &str) -> Vec<Vec<u8>> {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus");
        let folder = corpus.join(target);
        let inputs = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let inputs: Vec<_> = inputs.map(|input| fs::read(input.unwrap().path()).unwrap()).collect();
        assert!(!inputs.is_empty(), "{} is empty", folder.display());
        inputs
    }

    #[test]
    fn every_kept_input_holds() {
        for Target { name, run } in TARGETS {
            kept(name).iter().for_each(|input| run(input));
        }
    }

    /// Without a fuzzer's eye for what is new; the same inputs each time.
    #[test]
    fn changed_inputs_hold() {
        for Target { name, run } in TARGETS {
            let (inputs, mut rng) = (kept(name), fastrand::Rng::with_seed(7));
            for _ in 0..CHANGED {
                let [one, other] = [(); 2].map(|()| &inputs[rng.usize(..inputs.len())]);
                run(&changed(one, other, &mut rng));
            }
        }
    }

    fn changed(input: &[u8], other: &[u8], rng: &mut fastrand::Rng) -> Vec<u8> {
        let mut input = input.to_vec();
        for _ in 0..rng.usize(1..=4) {
            let at = rng.usize(..=input.len());
            let end = rng.usize(at..=input.len().min(at + 64));
            match rng.u8(..6) {
                0 => drop(input.drain(at..end)),
                1 => input.extend_from_within(at..end),
                2 => input.truncate(at),
                3 => {
                    let from = rng.usize(..=other.len());
                    let piece = &other[from..other.len().min(from + 64)];
                    drop(input.splice(at..end, piece.iter().copied()));
                }
                4 => input[at..end].fill([0, 0x7f, 0x80, 0xff, b'/', b'.'][rng.usize(..6)]),
                _ => {
                    if let Some(byte) = input.get_mut(at) {
                        *byte ^= 1 << rng.u8(..8);
                    }
                }
            }
        }
        input
    }

    #[test]
    fn an_input_is_cut_by_the_lengths_in_it() {
        assert_eq!(pieces(&[0, 1, 7, 0, 2, 8, 9]), [&[7][..], &[8, 9]]);
        assert_eq!(pieces(&[0, 9, 7]), [[7]]);
        assert_eq!(pieces(&[0]), [[0; 0]; 0]);
    }
}
