//! Certificates with every kind of fault, refused in both roles with a reason.

use std::time::{Duration, Instant, SystemTime};

use rcgen::{BasicConstraints, CertificateParams, CustomExtension, ExtendedKeyUsagePurpose, IsCa, SanType};
use rustls::RootCertStore;
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, UnixTime};

use super::super::{Check, Purpose};
use super::*;
use crate::identity::testing::{CrlOptions, SHA1_LEAF_AND_ROOT, WEAK_RSA_ROOT, id};
use crate::identity::{CrlPolicy, PrivateKey, TrustDomain, TrustSettings, chain, tls, verify};

/// One who shows a chain that no CA of ours would give out.
struct Odd {
    what: &'static str,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKey,
    /// Whom the judge trusts.
    roots: Vec<Root>,
    reason: &'static str,
    /// What the peer is told; empty where TLS gives no word for it, or none at all.
    told: &'static str,
}

const PEERS_LOG: &str = "the peer's log tells why";
const CLOCK: &str = "it has expired, or is not valid yet, by the peer's clock";

fn odd_ones() -> Vec<Odd> {
    let cart = id("shop", "cart");
    let ca = TestCa::new();
    let hour = Duration::from_secs(3600);
    let now = SystemTime::now();
    let expired = |params: &mut CertificateParams| {
        params.not_before = (now - 2 * hour).into();
        params.not_after = (now - hour).into();
    };
    let mut odd = Vec::new();
    let mut leaf = |what, change: &dyn Fn(&mut CertificateParams), reason, told| {
        let (leaf, key) = ca.odd_leaf(&cart, change);
        odd.push(Odd {
            what,
            chain: vec![leaf, ca.intermediate_der()],
            key,
            roots: vec![ca.root()],
            reason,
            told,
        });
    };
    let uri = |text: &str| SanType::URI(text.try_into().unwrap());
    leaf(
        "two identities",
        &|params| {
            params
                .subject_alt_names
                .push(uri("spiffe://cluster.local/ns/shop/sa/till"))
        },
        "has 2 URI names; an identity is exactly one",
        PEERS_LOG,
    );
    leaf(
        "no identity",
        &|params| params.subject_alt_names.clear(),
        "has no URI name",
        PEERS_LOG,
    );
    leaf(
        "a strange identity",
        &|params| params.subject_alt_names = vec![uri("spiffe://cluster.local/shop/cart")],
        "is not an identity",
        PEERS_LOG,
    );
    leaf(
        "wrong usage",
        &|params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning],
        "extended key usage does not allow TLS in this role",
        "",
    );
    leaf("expired", &expired, "has expired", CLOCK);
    leaf(
        "not yet valid",
        &|params| params.not_before = (now + hour / 2).into(),
        "is not valid yet; compare the clocks",
        CLOCK,
    );
    leaf(
        "an authority's own",
        &|params| params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained),
        "is an authority's own",
        PEERS_LOG,
    );
    let mut with_intermediate = |what, change: &dyn Fn(&mut CertificateParams), reason, told| {
        let ca = TestCa::with_intermediate(change);
        let (leaf, key) = ca.odd_leaf(&cart, |_| {});
        odd.push(Odd {
            what,
            chain: vec![leaf, ca.intermediate_der()],
            key,
            roots: vec![ca.root()],
            reason,
            told,
        });
    };
    with_intermediate(
        "an expired intermediate",
        &expired,
        "or one of its issuers has expired",
        CLOCK,
    );
    with_intermediate(
        "constrained to other names",
        &|params| params.custom_extensions.push(uri_constraint(".other.example")),
        "name constraints of an issuer do not allow",
        PEERS_LOG,
    );
    let short = TestCa::with_intermediate(|params| params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0)));
    let (below, leaf, key) = short.leaf_below(&cart, |_| {});
    odd.push(Odd {
        what: "more authorities than allowed",
        chain: vec![leaf, below, short.intermediate_der()],
        key,
        roots: vec![short.root()],
        reason: "allows fewer authorities below it",
        told: PEERS_LOG,
    });
    let (below, leaf, key) = ca.leaf_below(&cart, |params| params.is_ca = IsCa::ExplicitNoCa);
    odd.push(Odd {
        what: "signed by a workload",
        chain: vec![leaf, below, ca.intermediate_der()],
        key,
        roots: vec![ca.root()],
        reason: "signed by one that is not an authority's",
        told: PEERS_LOG,
    });
    let of = |chain: &dyn Fn(CertificateDer<'static>) -> Vec<CertificateDer<'static>>| {
        let (leaf, key) = ca.odd_leaf(&cart, |_| {});
        (chain(leaf), key)
    };
    let mut long = |what, chain: &dyn Fn(CertificateDer<'static>) -> Vec<CertificateDer<'static>>, reason, told| {
        let (chain, key) = of(chain);
        odd.push(Odd {
            what,
            chain,
            key,
            roots: vec![ca.root()],
            reason,
            told,
        });
    };
    let intermediate = ca.intermediate_der();
    long(
        "nine certificates",
        &|leaf| std::iter::once(leaf).chain(vec![intermediate.clone(); 8]).collect(),
        "a chain of 9 certificates is too long",
        PEERS_LOG,
    );
    long(
        "1 MB",
        &|leaf| vec![leaf, intermediate.clone(), vec![0x30; 1 << 20].into()],
        "its chain is larger than 64 KiB",
        "",
    );
    let weak = CertificateDer::from_pem_slice(WEAK_RSA_ROOT.as_bytes()).unwrap();
    let weak_key = chain::parse(&weak).unwrap().public_key().raw.to_vec();
    odd.push(Odd {
        what: "an RSA key of 1024 bits",
        chain: vec![ca.leaf_for_key(&cart, &weak_key), intermediate.clone()],
        key: PrivateKey::generate().unwrap(),
        roots: vec![ca.root()],
        reason: "an RSA key of 1024 bits; it takes 2048",
        told: PEERS_LOG,
    });
    let sha1: Vec<_> = CertificateDer::pem_slice_iter(SHA1_LEAF_AND_ROOT.as_bytes())
        .collect::<Result<_, _>>()
        .unwrap();
    odd.push(Odd {
        what: "signed with SHA-1",
        chain: vec![sha1[0].clone()],
        key: PrivateKey::generate().unwrap(),
        roots: vec![Root::parse(&sha1[1]).unwrap()],
        reason: "signed with SHA-1, which can be forged",
        told: PEERS_LOG,
    });
    let (leaf, _) = ca.odd_leaf(&cart, |_| {});
    odd.push(Odd {
        what: "another's key",
        chain: vec![leaf, intermediate],
        key: PrivateKey::generate().unwrap(),
        roots: vec![ca.root()],
        reason: "does not have the private key",
        told: "",
    });
    odd
}

/// An extension that permits URIs of this host alone.
fn uri_constraint(host: &str) -> CustomExtension {
    let wrap = |tag: u8, inside: Vec<u8>| [vec![tag, inside.len() as u8], inside].concat();
    let subtree = wrap(0x30, wrap(0x86, host.as_bytes().to_vec()));
    let mut extension = CustomExtension::from_oid_content(&[2, 5, 29, 30], wrap(0x30, wrap(0xa0, subtree)));
    extension.set_criticality(true);
    extension
}

#[test]
fn faulty_certificates_are_refused_with_the_reason_in_both_roles() {
    let judges = TestCa::new();
    let desk = id("shop", "desk");
    for odd in odd_ones() {
        let judge = judges
            .certificate(&desk)
            .for_test(&Trust::of(&odd.roots), &Trust::of(&odd.roots));
        let trusts = Trust::of(&[judges.root()]);
        let home = TrustDomain::parse("cluster.local").unwrap();
        let key = Arc::new(CertifiedKey::new(odd.chain.clone(), odd.key.signing_key().unwrap()));
        let client_verifier = Arc::new(verify::ClientVerifier::new(trusts.clone(), home.clone()));
        let server = Arc::new(tls::server_config(Arc::clone(&key), client_verifier).unwrap());
        let server_verifier = Arc::new(verify::ServerVerifier::new(trusts, home, desk.clone()));
        let client = Arc::new(tls::client_config(key, server_verifier).unwrap());
        let as_server = shake(server, judge.client_config(&id("shop", "cart")));
        let as_client = shake(judge.server_config(), client);
        for (role, (judge, peer)) in [("server", (as_server.1, as_server.0)), ("client", as_client)] {
            let said = judge.expect_err(odd.what);
            let told = peer.err().unwrap_or_default();
            println!("{} as {role}: {said} // {told}", odd.what);
            assert!(said.contains(odd.reason), "{} as {role}: {said}", odd.what);
            assert!(told.contains(odd.told), "{} as {role}: the peer hears {told}", odd.what);
        }
    }
}

#[test]
fn what_is_asked_beyond_the_signatures_costs_little() {
    let ca = TestCa::new();
    let folder = tempfile::tempdir().unwrap();
    let (lists, distrusted) = (folder.path().join("crl"), folder.path().join("distrusted"));
    let serials: Vec<[u8; 4]> = (1..=10_000_u32)
        .map(|serial| (serial | 1 << 30).to_be_bytes())
        .collect();
    let serials: Vec<&[u8]> = serials.iter().map(|serial| &serial[..]).collect();
    let of_root = CrlOptions {
        of_root: true,
        ..CrlOptions::default()
    };
    let (of_leaves, of_root) = (ca.crl(&serials, CrlOptions::default()), ca.crl(&[], of_root));
    std::fs::write(&lists, format!("{}{}", of_leaves.pem, of_root.pem)).unwrap();
    std::fs::write(&distrusted, TestCa::new().root_pem()).unwrap();
    let full = Trust::new(TrustSettings {
        crls: vec![lists],
        crl_policy: CrlPolicy::Strict,
        distrust: Some(distrusted),
        ..TrustSettings::default()
    });
    full.learn(&[ca.root()], Duration::from_secs(3600));
    let (leaf, _) = ca.odd_leaf(&id("shop", "cart"), |_| {});
    let rest = [ca.intermediate_der()];
    let home = TrustDomain::parse("cluster.local").unwrap();
    let at = UnixTime::now();
    let best = |work: &dyn Fn()| {
        let rounds = (0..10).map(|_| {
            let begin = Instant::now();
            (0..20).for_each(|_| work());
            begin.elapsed() / 20
        });
        rounds.min().unwrap()
    };
    let ours = |trust: &Trust| {
        best(&|| {
            let check = Check {
                snapshot: &trust.snapshot(),
                home: &home,
                role: Role::Server,
                purpose: Purpose::Handshake,
                at,
            };
            check.verify(&leaf, &rest).unwrap();
        })
    };
    let mut roots = RootCertStore::empty();
    roots.roots.push(ca.root().anchor);
    let library = best(&|| {
        let parsed = ParsedCertificate::try_from(&leaf).unwrap();
        let algorithms = tls::provider().signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &roots, &rest, at, algorithms).unwrap();
    });
    let (plain, full) = (ours(&trusting(&[&ca])), ours(&full));
    println!("signatures alone {library:?}, plain {plain:?}, with revocation and distrust {full:?}");
    assert!(
        plain < 2 * library && full < 3 * library,
        "{library:?} {plain:?} {full:?}"
    );
}
