//! The CA gives a node's proxy the certificates of that node's pods, and nothing to anybody else.

use std::time::Duration;

use adit_tests::bed::Bed;
use adit_tests::bed::process::TokenSpec;
use adit_tests::bed::wait_for;
use adit_tests::ca_call::{
    CaAnswer, CaCall, INVALID_ARGUMENT, PERMISSION_DENIED, UNAUTHENTICATED, certificate_text, csr,
};

use crate::world::{SOON, world};

/// The world with its CA, but no proxy.
fn with_ca(name: &str) -> Bed {
    let bed = world(name).build().unwrap();
    bed.start_ca().unwrap();
    bed
}

fn token_of(node: &str) -> TokenSpec {
    TokenSpec {
        node: node.to_owned(),
        ..TokenSpec::default()
    }
}

/// Asks for the client's certificate, which runs on n1, with a token of this kind.
fn ask_with(bed: &Bed, token: &TokenSpec) -> CaAnswer {
    ask_for(bed, Some(bed.token(token).unwrap()), &bed.pod("client").identity())
}

fn ask_for(bed: &Bed, token: Option<String>, identity: &str) -> CaAnswer {
    let call = CaCall {
        token,
        csr: csr(identity).unwrap(),
        identity: Some(identity.to_owned()),
        seconds: 3600,
    };
    call.send(bed, bed.node("n1")).unwrap()
}

fn assert_refused(bed: &Bed, answer: &CaAnswer, status: u32, what: &str) {
    assert_eq!(answer.status, status, "{what}: {answer:?}");
    assert!(answer.chain.is_empty(), "{what}: {answer:?}");
    assert!(!answer.message.is_empty(), "{what}: the reason is said");
    assert!(
        !bed.ca_log().text().is_empty(),
        "{what}: the refusal is in the audit log"
    );
}

#[test]
fn a_node_gets_the_certificate_of_its_own_pod() {
    let bed = with_ca("own pod");
    let identity = bed.pod("client").identity();
    let answer = ask_with(&bed, &token_of("n1"));
    assert_eq!(answer.status, 0, "{answer:?}");
    assert!(answer.chain.len() >= 2, "leaf, then root last: {answer:?}");
    let leaf = certificate_text(&answer.chain[0], bed.dir()).unwrap();
    assert!(leaf.contains(&format!("URI:{identity}")), "{leaf}");
    assert!(leaf.contains("CA:FALSE"), "{leaf}");
    bed.ca_log().wait_for(&identity, SOON).unwrap();
}

#[test]
fn the_identity_in_the_request_counts_and_not_the_one_in_the_csr() {
    let bed = with_ca("csr");
    let (asked, written) = (bed.pod("client").identity(), bed.pod("server").identity());
    let call = CaCall {
        token: Some(bed.token(&token_of("n1")).unwrap()),
        csr: csr(&written).unwrap(),
        identity: Some(asked.clone()),
        seconds: 3600,
    };
    let answer = call.send(&bed, bed.node("n1")).unwrap();
    if answer.status == 0 {
        let leaf = certificate_text(&answer.chain[0], bed.dir()).unwrap();
        assert!(leaf.contains(&asked) && !leaf.contains(&written), "{leaf}");
    }
}

#[test]
fn what_a_node_is_not_entitled_to_is_refused_with_the_reason() {
    let bed = with_ca("not entitled");
    let n1 = || Some(bed.token(&token_of("n1")).unwrap());
    let cases = [
        ("a pod of another node", bed.pod("server").identity()),
        ("a pod outside the mesh", bed.pod("outsider").identity()),
        (
            "nobody's identity",
            "spiffe://cluster.local/ns/shop/sa/nobody".to_owned(),
        ),
        (
            "another trust domain",
            "spiffe://elsewhere.example/ns/shop/sa/client".to_owned(),
        ),
    ];
    for (what, identity) in cases {
        let answer = ask_for(&bed, n1(), &identity);
        assert!(answer.status != 0 && answer.chain.is_empty(), "{what}: {answer:?}");
        assert!(
            [PERMISSION_DENIED, INVALID_ARGUMENT].contains(&answer.status),
            "{what}: {answer:?}"
        );
        assert!(!answer.message.is_empty(), "{what}: the reason is said");
    }
    // The refusals are on record with the identity that was asked for.
    bed.ca_log().wait_for(&bed.pod("server").identity(), SOON).unwrap();

    let other_account = TokenSpec {
        account: Some("shop/client".to_owned()),
        ..token_of("n1")
    };
    assert_refused(
        &bed,
        &ask_with(&bed, &other_account),
        PERMISSION_DENIED,
        "a pod's own account",
    );
    assert_refused(
        &bed,
        &ask_with(&bed, &token_of("n2")),
        PERMISSION_DENIED,
        "the proxy of another node",
    );
    assert_refused(
        &bed,
        &ask_with(&bed, &token_of("n9")),
        PERMISSION_DENIED,
        "a node that is not there",
    );
}

#[test]
fn a_caller_without_a_good_token_is_refused() {
    let bed = with_ca("token");
    let identity = bed.pod("client").identity();
    let other_audience = TokenSpec {
        audience: Some("somebody-else".to_owned()),
        ..token_of("n1")
    };
    assert_refused(
        &bed,
        &ask_with(&bed, &other_audience),
        UNAUTHENTICATED,
        "another audience",
    );
    assert_refused(&bed, &ask_for(&bed, None, &identity), UNAUTHENTICATED, "no token");
    let garbage = Some("not.a.token".to_owned());
    assert_refused(&bed, &ask_for(&bed, garbage, &identity), UNAUTHENTICATED, "garbage");

    // The right claims with another's signature: the last characters of a good token changed.
    let mut forged = bed.token(&token_of("n1")).unwrap();
    let tail = forged.split_off(forged.len() - 8);
    forged.push_str(if tail == "AAAAAAAA" { "BBBBBBBB" } else { "AAAAAAAA" });
    assert_refused(
        &bed,
        &ask_for(&bed, Some(forged), &identity),
        UNAUTHENTICATED,
        "a forged signature",
    );
}

#[test]
fn a_token_that_has_expired_is_refused() {
    let bed = with_ca("expired");
    let identity = bed.pod("client").identity();
    let token = bed
        .token(&TokenSpec {
            lifetime: Some(1),
            ..token_of("n1")
        })
        .unwrap();
    // Clocks may differ by some seconds, for which the CA may allow.
    let mut last = None;
    wait_for("the token to be refused", Duration::from_secs(15), || {
        let answer = ask_for(&bed, Some(token.clone()), &identity);
        let refused = answer.status != 0;
        last = Some(answer);
        Ok(refused)
    })
    .unwrap();
    let answer = last.unwrap();
    assert_refused(&bed, &answer, UNAUTHENTICATED, "an expired token");
    assert!(answer.message.contains("expired"), "{answer:?}");
}

#[test]
fn a_csr_that_is_none_or_is_not_signed_by_its_key_is_refused() {
    let bed = with_ca("bad csr");
    let identity = bed.pod("client").identity();
    let good = csr(&identity).unwrap();
    // One character in the middle of the signature, near the end.
    let at = good.trim_end().len() - "-----END CERTIFICATE REQUEST-----".len() - 20;
    let mut tampered = good.clone().into_bytes();
    tampered[at] = if tampered[at] == b'A' { b'B' } else { b'A' };
    let cases = [
        ("nothing", String::new()),
        ("garbage", "garbage".to_owned()),
        (
            "an empty PEM",
            "-----BEGIN CERTIFICATE REQUEST-----\n-----END CERTIFICATE REQUEST-----\n".to_owned(),
        ),
        ("half of one", good[..good.len() / 2].to_owned()),
        ("a changed signature", String::from_utf8(tampered).unwrap()),
        ("60 KiB of nothing", "A".repeat(60 << 10)),
    ];
    for (what, csr) in cases {
        let call = CaCall {
            token: Some(bed.token(&token_of("n1")).unwrap()),
            csr,
            identity: Some(identity.clone()),
            seconds: 3600,
        };
        let answer = call.send(&bed, bed.node("n1")).unwrap();
        assert!(answer.status != 0 && answer.chain.is_empty(), "{what}: {answer:?}");
    }
    // What is too long to be read at all ends the call, with or without a status.
    let call = CaCall {
        token: Some(bed.token(&token_of("n1")).unwrap()),
        csr: "A".repeat(8 << 20),
        identity: Some(identity),
        seconds: 3600,
    };
    assert!(
        call.send(&bed, bed.node("n1"))
            .map_or(true, |answer| answer.status != 0)
    );
    assert_eq!(ask_with(&bed, &token_of("n1")).status, 0, "the CA still serves");
}
