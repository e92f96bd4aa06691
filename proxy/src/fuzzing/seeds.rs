//! Makes what the fuzzer begins with: what an authority, callers and operators would really send, and some of what they would
//! not. `ADIT_WRITE_SEEDS=1 cargo test --release -p adit --lib seeds` writes it anew, with new keys, which are forgotten.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{CertificateParams, KeyPair, SanType};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

use crate::ca::fuzz::{AUDIENCE, ISSUER, KNOWN_POD, token_of};
use crate::ca::token::TokenRequest;
use crate::identity::SpiffeId;
use crate::identity::fuzz::{KNOWN_ID, NOW};
use crate::identity::testing::{CrlOptions, LeafOptions, TestCa, WEAK_RSA_ROOT};

const YEAR: Duration = Duration::from_secs(365 * 86_400);

/// Writes the inputs of a target, numbered.
fn write(target: &str, inputs: &[Vec<u8>]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fuzz/corpus")
        .join(target);
    fs::create_dir_all(&folder).unwrap();
    for (number, input) in inputs.iter().enumerate() {
        fs::write(folder.join(format!("seed-{number}")), input).unwrap();
    }
}

/// Writes what a target knows, to be compiled into it.
fn know(file: &str, content: &[u8]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/fuzzing");
    fs::write(folder.join(file), content).unwrap();
}

fn now() -> SystemTime {
    UNIX_EPOCH + NOW
}

fn der(pem: &str) -> Vec<u8> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec()
}

fn joined(pieces: &[&[u8]]) -> Vec<u8> {
    let framed = |piece: &&[u8]| [&u16::try_from(piece.len()).unwrap().to_be_bytes(), *piece].concat();
    pieces.iter().flat_map(framed).collect()
}

#[test]
fn seeds_are_written_on_request() {
    if std::env::var_os("ADIT_WRITE_SEEDS").is_none() {
        return;
    }
    let texts = |all: &[&str]| all.iter().map(|text| text.as_bytes().to_vec()).collect::<Vec<_>>();
    let names = [
        KNOWN_ID,
        "cluster.local",
        "spiffe://a/ns/../sa/c",
        "spiffe://a/ns/b/sa/c%2f",
    ];
    write("spiffe_id", &texts(&names));
    chains();
    requests();
    tokens();
}

/// Of an authority, and of another.
fn chains() {
    let (ca, other) = (TestCa::new(), TestCa::new());
    let id = SpiffeId::parse(KNOWN_ID).unwrap();
    let span = |from, to| LeafOptions {
        not_before: from,
        not_after: to,
        ..LeafOptions::default()
    };
    let chain = |ca: &TestCa, options| ca.issue_with(&id, options).0;
    let good = chain(&ca, span(now() - YEAR, now() + 20 * YEAR));
    let [leaf, intermediate, root] = [0, 1, 2].map(|at| der(&good[at]));
    know("root.der", &root);
    let two = format!("{}{}", good[2], other.root_pem());
    let cross = ca.cross_signed_by(&other);
    let answers = [
        good.join("\0"),
        [&good[0], &good[1], &two].map(String::as_str).join("\0"),
        good.concat(),
        [&good[0], &good[1], &format!("{cross}{two}")]
            .map(String::as_str)
            .join("\0"),
    ];
    write("answer", &answers.map(String::into_bytes));
    let old = chain(&ca, span(now() - 2 * YEAR, now() - YEAR));
    let foreign = chain(&other, span(now() - YEAR, now() + 20 * YEAR));
    let two_names = ca.leaf_with_uris(&[KNOWN_ID, "spiffe://cluster.local/ns/shop/sa/till"]);
    let chains = [
        joined(&[&leaf, &intermediate]),
        joined(&[&leaf]),
        joined(&[&leaf, &intermediate, &root]),
        joined(&[&der(&old[0]), &intermediate]),
        joined(&[&der(&foreign[0]), &der(&foreign[1])]),
        joined(&[&two_names, &intermediate]),
        joined(&[&root]),
    ];
    write("peer_chain", &chains);
    let bundles = [
        good[2].clone(),
        format!("# both\n{two}"),
        format!("{WEAK_RSA_ROOT}{two}"),
    ];
    write("bundle", &bundles.map(String::into_bytes));
    let fingerprint = ["AB"; 32].join(":");
    let lists = [
        good[2].clone(),
        format!(
            "sha256 Fingerprint={fingerprint} # stolen\n{}",
            fingerprint.replace(':', "")
        ),
        "# nothing\n".to_owned(),
    ];
    write("distrust", &lists.map(String::into_bytes));
    let (_, key) = ca.intermediate_name_and_key();
    know("issuer-key.der", &key);
    let part = CrlOptions {
        only_leaves: true,
        ..CrlOptions::default()
    };
    let (whole, part) = (ca.crl(&[&[7]], CrlOptions::default()), ca.crl(&[&[7]], part));
    let theirs = other.crl(&[&[1], &[0, 7]], CrlOptions::default());
    let lists = [
        whole.der.clone(),
        whole.pem.into_bytes(),
        part.der,
        [whole.der, theirs.der].concat(),
        theirs.pem.into_bytes(),
    ];
    write("crl", &lists);
}

fn requests() {
    let request = |algorithm, names: &[&str]| {
        let mut params = CertificateParams::default();
        let names = names.iter().map(|name| SanType::URI((*name).try_into().unwrap()));
        params.subject_alt_names = names.collect();
        let key = KeyPair::generate_for(algorithm).unwrap();
        params.serialize_request(&key).unwrap()
    };
    let plain = |algorithm| request(algorithm, &[]).der().to_vec();
    let asking = request(&rcgen::PKCS_ECDSA_P256_SHA256, &[KNOWN_ID, "https://a.example"]);
    let all = [
        plain(&rcgen::PKCS_ECDSA_P256_SHA256),
        plain(&rcgen::PKCS_ECDSA_P384_SHA384),
        plain(&rcgen::PKCS_ED25519),
        plain(&rcgen::PKCS_RSA_SHA256),
        asking.der().to_vec(),
        asking.pem().unwrap().into_bytes(),
    ];
    write("csr", &all);
}

fn tokens() {
    let issuer = |pod: &str, ttl: Duration| {
        let folder = tempfile::tempdir().unwrap();
        let request = TokenRequest {
            dir: folder.path().join("issuer"),
            issuer: ISSUER.to_owned(),
            audience: AUDIENCE.to_owned(),
            account: "adit-system/adit-node".parse().unwrap(),
            pod: pod.to_owned(),
            node: "n1".to_owned(),
            ttl,
        };
        (folder, request)
    };
    let (kept, request) = issuer(KNOWN_POD, YEAR);
    let token = |request: &TokenRequest| token_of(request, now() - Duration::from_secs(3600));
    let good = token(&request);
    let old = token(&TokenRequest {
        ttl: Duration::from_secs(60),
        ..request.clone()
    });
    let (_folder, other) = issuer("thief", YEAR);
    let keys = fs::read(kept.path().join("issuer/jwks.json")).unwrap();
    know("jwks.json", &keys);
    let claims = format!(
        r#"{{"iss":"{ISSUER}","sub":"system:serviceaccount:adit-system:adit-node","aud":["{AUDIENCE}"],"exp":2000000000,"kubernetes.io":{{"namespace":"adit-system","serviceaccount":{{"name":"adit-node","uid":"u"}},"pod":{{"name":"p","uid":"v"}}}}}}"#
    );
    let symmetric = b"eyJhbGciOiJIUzI1NiJ9.e30.AAAA".to_vec();
    let none = b"eyJhbGciOiJub25lIn0.e30.".to_vec();
    write(
        "token",
        &[good, old, token(&other), claims.into_bytes(), symmetric, none],
    );
    let rsa = format!(
        r#"{{"keys":[{{"kty":"RSA","use":"sig","kid":"r","n":"{}","e":"AQAB"}}]}}"#,
        "qw".repeat(171)
    );
    write("jwks", &[keys, rsa.into_bytes()]);
}
