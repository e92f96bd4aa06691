//! Promises about what names identities and vouches for them, held against any bytes.

use std::sync::OnceLock;
use std::time::{Duration, UNIX_EPOCH};

use rustls_pki_types::{CertificateDer, UnixTime};

use super::chain::{Chain, Leaf, MAX_ROOTS, check_bounds, validity};
use super::trust::{Check, Purpose, Role, Root, Trust};
use super::{MAX_CHAIN_BYTES, MAX_CHAIN_CERTS, MAX_ID_LEN, MAX_TRUST_DOMAIN_LEN, SpiffeId, TrustDomain};
use crate::fuzzing::pieces;

pub(crate) use super::trust::fuzz::{bundle, crl, distrust};

/// The only identity that [`ROOT`] has ever vouched for.
pub(crate) const KNOWN_ID: &str = "spiffe://cluster.local/ns/shop/sa/cart";
/// A moment at which the chain that is kept is valid: some day of 2026.
pub(crate) const NOW: Duration = Duration::from_secs(1_790_000_000);

/// A root whose key nobody has any more.
const ROOT: &[u8] = include_bytes!("../fuzzing/root.der");

/// An identity prints as it was read, and is what its parts make.
pub(crate) fn spiffe_id(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    if let Ok(domain) = TrustDomain::parse(text) {
        assert_eq!(domain.as_str(), text);
        assert!((1..=MAX_TRUST_DOMAIN_LEN).contains(&text.len()));
    }
    let Ok(id) = SpiffeId::parse(text) else { return };
    assert_eq!(id.to_string(), text);
    assert!(text.len() <= MAX_ID_LEN && text.is_ascii());
    assert_eq!(text.strip_prefix("spiffe://"), Some(id.principal()));
    let domain = TrustDomain::parse(id.trust_domain());
    let made = domain.and_then(|domain| SpiffeId::new(&domain, id.namespace(), id.service_account()));
    assert_eq!(made, Ok(id));
}

/// An authority's answer that is accepted has a leaf and a root, and no more of anything than its bounds allow. The input is
/// its strings, with a zero byte after each but the last.
pub(crate) fn answer(data: &[u8]) {
    let strings: Result<Vec<_>, _> = data
        .split(|byte| *byte == 0)
        .map(|piece| str::from_utf8(piece).map(str::to_owned))
        .collect();
    let Ok(strings) = strings else { return };
    let Ok(chain) = Chain::parse(&strings) else { return };
    assert!(strings.iter().map(String::len).sum::<usize>() <= MAX_CHAIN_BYTES);
    assert!((1..=MAX_CHAIN_CERTS).contains(&chain.presented.len()));
    assert!((1..=MAX_ROOTS).contains(&chain.roots.len()));
    if let Some((leaf, rest)) = chain.presented.split_first() {
        assert_eq!(check_bounds(leaf, rest), Ok(()), "it can be presented");
        if let Ok(leaf) = Leaf::parse(leaf) {
            spiffe_id(leaf.id.as_str().as_bytes());
            assert!(leaf.serial.bytes().all(|byte| byte.is_ascii_hexdigit()));
        }
    }
    // Whatever the dates are, they can be told.
    let _ = validity(&chain.presented);
}

/// A peer whose chain is accepted is the only one whom the root has ever vouched for. The input is the certificates, in
/// pieces.
pub(crate) fn peer_chain(data: &[u8]) {
    static TRUST: OnceLock<(Trust, TrustDomain)> = OnceLock::new();
    let (trust, home) = TRUST.get_or_init(|| {
        let root = Root::parse(&CertificateDer::from(ROOT)).expect("the kept root is one");
        let home = TrustDomain::parse("cluster.local").expect("a trust domain");
        (Trust::of(&[root]), home)
    });
    let chain: Vec<CertificateDer<'_>> = pieces(data).into_iter().map(CertificateDer::from).collect();
    let Some((leaf, rest)) = chain.split_first() else {
        return;
    };
    let snapshot = trust.snapshot();
    for (role, purpose) in [
        (Role::Client, Purpose::Handshake),
        (Role::Server, Purpose::Handshake),
        (Role::Client, Purpose::Live),
    ] {
        let check = Check {
            snapshot: &snapshot,
            home,
            role,
            purpose,
            at: UnixTime::since_unix_epoch(NOW),
        };
        if let Ok(id) = check.verify(leaf, rest) {
            assert_eq!(id.as_str(), KNOWN_ID);
            assert!(chain.len() <= MAX_CHAIN_CERTS);
            let (from, to) = validity(&chain[..1]).expect("the dates of a leaf that was accepted");
            assert!((from..to).contains(&(UNIX_EPOCH + NOW)));
        }
    }
}
