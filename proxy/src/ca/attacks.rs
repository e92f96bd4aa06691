//! What a caller tries who may not: the real service over real TLS and gRPC, with the API server's word made up.

mod world;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use k8s_openapi::api::authentication::v1::TokenReviewStatus;
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use serde_json::json;
use tonic::{Code, Request};

use self::world::{ApiServer, CART, TILL, ask, code, mesh, request, serve};
use super::limits::LimitSettings;
use crate::identity::proto::IMPERSONATED_IDENTITY;
use crate::identity::proto::istio_certificate_service_client::IstioCertificateServiceClient;

#[tokio::test(flavor = "multi_thread")]
async fn a_token_for_somebody_else_or_bound_to_nothing_or_made_up_gets_nothing() {
    let world = serve(true, LimitSettings::default()).await;
    let (api, one) = (&world.api, world.from(1).await);
    let good = api.token_of_proxy(1);
    let (pod, uid, node) = (("pod-name", "adit-1"), ("pod-uid", "uid-1"), ("node-name", "n1"));
    let account = "adit-system:adit-node";
    let elsewhere = api.token(account, &[pod, uid, node]);
    let status = TokenReviewStatus {
        audiences: Some(vec!["istio-ca".into()]),
        ..api.says.lock().unwrap()[&elsewhere].clone()
    };
    api.says.lock().unwrap().insert(elsewhere.clone(), status);
    for (what, token, expected) in [
        ("good", good.clone(), Code::Ok),
        (
            "for somebody else, as the API server says",
            elsewhere,
            Code::Unauthenticated,
        ),
        ("unbound", api.token(account, &[]), Code::PermissionDenied),
        (
            "bound to a node only",
            api.token(account, &[node]),
            Code::PermissionDenied,
        ),
        (
            "of a pod's name without its uid",
            api.token(account, &[pod, node]),
            Code::PermissionDenied,
        ),
        (
            "of a pod of the same name that was there before",
            api.token(account, &[pod, ("pod-uid", "uid-0"), node]),
            Code::Unavailable,
        ),
        (
            "of another pod, whose uid is right",
            api.token(account, &[("pod-name", "adit-2"), uid, node]),
            Code::PermissionDenied,
        ),
        (
            "of a pod that is elsewhere",
            api.token(account, &[pod, uid, ("node-name", "n2")]),
            Code::PermissionDenied,
        ),
        (
            "of another account",
            api.token("shop:cart", &[pod, uid, node]),
            Code::PermissionDenied,
        ),
        (
            "of an account with tricks",
            api.token("adit-system/adit-node:x", &[pod, uid, node]),
            Code::Unauthenticated,
        ),
        (
            "nobody's",
            ApiServer::default().token(account, &[pod, uid, node]),
            Code::Unauthenticated,
        ),
        ("garbage", "a.b.c".to_owned(), Code::Unauthenticated),
        ("too long", "x".repeat(20_000), Code::Unauthenticated),
    ] {
        assert_eq!(code(ask(&one, &token, CART).await), expected, "{what}");
    }
    // Stolen, and used from another node.
    assert_eq!(
        code(ask(&world.from(2).await, &good, CART).await),
        Code::PermissionDenied
    );

    // By keys that were handed over: other audiences, issuers' other tokens.
    let world = serve(false, LimitSettings::default()).await;
    let one = world.from(1).await;
    for (token, expected) in [
        (world.made("adit-ca", "n1"), Code::Ok),
        (world.made("istio-ca", "n1"), Code::Unauthenticated),
        (world.made("adit-ca", "n2"), Code::PermissionDenied),
        (ApiServer::default().token_of_proxy(1), Code::Unauthenticated),
    ] {
        assert_eq!(code(ask(&one, &token, CART).await), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_a_deleted_pod_is_of_no_use_within_a_second_and_neither_is_the_identity_of_one() {
    let world = serve(true, LimitSettings::default()).await;
    let (one, token) = (world.from(1).await, world.api.token_of_proxy(1));
    assert_eq!(code(ask(&one, &token, CART).await), Code::Ok);
    // The identity's pod has gone, ended, or is on another node now.
    world.mesh.publish(mesh("cart"));
    let begin = Instant::now();
    assert_eq!(code(ask(&one, &token, CART).await), Code::PermissionDenied);
    world.mesh.publish(mesh(""));
    assert_eq!(code(ask(&one, &token, CART).await), Code::Ok);
    // The caller's has; the API server would still say that the token is good, and what it said is remembered.
    world.mesh.publish(mesh("adit-1"));
    let refused = ask(&one, &token, CART).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("gone"), "{refused}");
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert_eq!(*world.api.reviews.lock().unwrap(), 1);
}

/// A request whose strings may be anything.
#[derive(Clone, PartialEq, prost::Message)]
struct RawRequest {
    #[prost(string, tag = "1")]
    csr: String,
    #[prost(message, optional, tag = "4")]
    metadata: Option<RawStruct>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RawStruct {
    #[prost(message, repeated, tag = "1")]
    fields: Vec<RawField>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RawField {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<RawValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RawValue {
    #[prost(bytes = "vec", tag = "3")]
    text: Vec<u8>,
}

#[tokio::test(flavor = "multi_thread")]
async fn no_identity_but_one_of_the_nodes_own_pods_is_granted_however_it_is_written() {
    let world = serve(true, LimitSettings::default()).await;
    let (one, token) = (world.from(1).await, world.api.token_of_proxy(1));
    let long = format!("spiffe://cluster.local/ns/shop/sa/{}", "c".repeat(5000));
    let refused = [
        TILL,
        "spiffe://cluster.local/ns/adit-system/sa/adit-node",
        "spiffe://elsewhere/ns/shop/sa/cart",
        "spiffe://CLUSTER.LOCAL/ns/shop/sa/cart",
        "SPIFFE://cluster.local/ns/shop/sa/cart",
        "spiffe://cluster.local./ns/shop/sa/cart",
        "spiffe://cluster.local:15012/ns/shop/sa/cart",
        "spiffe://x@cluster.local/ns/shop/sa/cart",
        "spiffe://cluster.local/ns/shop/sa/cart/",
        "spiffe://cluster.local/ns/shop/sa/cart/x",
        "spiffe://cluster.local//ns/shop/sa/cart",
        "spiffe://cluster.local/ns//sa/cart",
        "spiffe://cluster.local/ns/shop/sa/",
        "spiffe://cluster.local/ns/shop/sa/../sa/cart",
        "spiffe://cluster.local/ns/./sa/cart",
        "spiffe://cluster.local/ns/till/../shop/sa/cart",
        "spiffe://cluster.local/ns/shop/sa/..",
        "spiffe://cluster.local/ns/shop/sa/%63art",
        "spiffe://cluster.local/ns/shop%2fsa%2fcart/sa/x",
        "spiffe://cluster.local/ns/shop/sa/cart?x",
        "spiffe://cluster.local/ns/shop/sa/cart#x",
        "spiffe://cluster.local/ns/shop/sa/cart\0",
        "spiffe://cluster.local/ns/shop/sa/cart\0.example",
        "spiffe://cluster.local/ns/shop/sa/cart\n",
        " spiffe://cluster.local/ns/shop/sa/cart",
        "spiffe://cluster.local/ns/shop/sa/Cart",
        "spiffe://cluster.local/ns/shop/sa/c\u{430}rt",
        "spiffe://cluster.local/ns/shop/sa/cart\u{200b}",
        "spiffe://cluster.local/ns/shop/sa/\u{202e}trac",
        "spiffe://cluster.local/NS/shop/SA/cart",
        "spiffe://cluster.local",
        "cluster.local/ns/shop/sa/cart",
        "https://cluster.local/ns/shop/sa/cart",
        "*",
        "",
        long.as_str(),
    ];
    let asked: Vec<_> = refused.iter().map(|identity| ask(&one, &token, identity)).collect();
    for (identity, outcome) in refused.iter().zip(futures_util::future::join_all(asked).await) {
        let status = outcome.unwrap_err();
        assert_eq!(status.code(), Code::PermissionDenied, "{identity:?}: {status}");
    }
    // Text that is none; and the identity twice, of which one would pass.
    let field = |text: &[u8]| RawField {
        key: IMPERSONATED_IDENTITY.into(),
        value: Some(RawValue { text: text.to_vec() }),
    };
    let csr = request(&token, CART).0.into_inner().csr;
    for fields in [
        vec![field(b"spiffe://cluster.local/ns/shop/sa/cart\xff")],
        vec![field(&[0xc0, 0xaf])],
        vec![field(CART.as_bytes()), field(TILL.as_bytes())],
    ] {
        let mut request = Request::new(RawRequest {
            csr: csr.clone(),
            metadata: Some(RawStruct { fields }),
        });
        request
            .metadata_mut()
            .insert("authorization", format!("Bearer {token}").parse().unwrap());
        let mut raw = tonic::client::Grpc::new(one.clone());
        raw.ready().await.unwrap();
        let path = "/istio.v1.auth.IstioCertificateService/CreateCertificate"
            .parse()
            .unwrap();
        let codec = tonic_prost::ProstCodec::<_, crate::identity::proto::IstioCertificateResponse>::default();
        assert!(raw.unary(request, path, codec).await.is_err());
    }
    assert_eq!(code(ask(&one, &token, CART).await), Code::Ok);

    // Each that could be read is one line, and says who asked for what; one of them was granted.
    let lines = world.audit.lines();
    assert_eq!(lines.len(), refused.len() + 2, "{lines:#?}");
    assert!(
        lines
            .iter()
            .all(|line| line["caller"] == "adit-system/adit-node" && line["node"] == "n1")
    );
    let granted: Vec<_> = lines.iter().filter(|line| line["outcome"] == "granted").collect();
    let [granted] = granted[..] else { panic!("{granted:?}") };
    for (field, expected) in [
        ("target", json!("audit")),
        ("level", json!("info")),
        ("caller_pod", json!("adit-1")),
        ("pod", json!("shop/cart")),
        ("identity", json!(CART)),
        ("lifetime_s", json!(600)),
        ("rule", json!("pod_on_node")),
    ] {
        assert_eq!(granted[field], expected, "{field}");
    }
    assert_eq!(granted["serial"].as_str().map(str::len), Some(32));
    let own = |line: &&serde_json::Value| line["rule"] == "proxy_identity" && line["reason"] != "";
    assert_eq!(lines.iter().filter(own).count(), 1);
}

/// What a request with 16 KiB and more of a signing request, and one of a message's limit, come to.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_too_large_is_refused_and_the_next_one_served() {
    let world = serve(true, LimitSettings::default()).await;
    let (one, token) = (world.from(1).await, world.api.token_of_proxy(1));
    for (bytes, expected) in [(17_000, Code::InvalidArgument), (70_000, Code::OutOfRange)] {
        let mut large = request(&token, CART).0;
        large.get_mut().csr = "A".repeat(bytes);
        let mut client = IstioCertificateServiceClient::new(one.clone());
        assert_eq!(code(client.create_certificate(large).await), expected, "{bytes}");
    }
    assert_eq!(code(ask(&one, &token, CART).await), Code::Ok);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_asks_for_ten_thousand_identities_gets_none_and_others_are_served_meanwhile() {
    let limits = LimitSettings {
        burst: 50,
        rate: 1,
        ..LimitSettings::default()
    };
    let world = serve(true, limits).await;
    let (one, token) = (world.from(1).await, world.api.token_of_proxy(1));
    let (two, other) = (world.from(2).await, world.api.token_of_proxy(2));
    let attack = async {
        let mut codes = BTreeMap::<String, u32>::new();
        let mut calls = FuturesUnordered::new();
        for number in 0..10_000 {
            let identity = format!("spiffe://cluster.local/ns/shop/sa/guess-{number}");
            let mut call = request(&token, CART).0;
            let kind = Some(Kind::StringValue(identity));
            call.get_mut().metadata = Some(Struct {
                fields: [(IMPERSONATED_IDENTITY.into(), Value { kind })].into(),
            });
            let mut client = IstioCertificateServiceClient::new(one.clone());
            calls.push(async move { client.create_certificate(call).await });
            if calls.len() >= 200 {
                let status = calls.next().await.unwrap().unwrap_err();
                *codes.entry(format!("{:?}", status.code())).or_default() += 1;
                if status.code() == Code::ResourceExhausted {
                    assert!(status.message().contains("1 requests a second"), "{status}");
                }
            }
        }
        while let Some(outcome) = calls.next().await {
            let status = outcome.unwrap_err();
            *codes.entry(format!("{:?}", status.code())).or_default() += 1;
        }
        codes
    };
    let served = async {
        let mut slowest = Duration::ZERO;
        for _ in 0..20 {
            let begin = Instant::now();
            assert_eq!(code(ask(&two, &other, TILL).await), Code::Ok);
            slowest = slowest.max(begin.elapsed());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        slowest
    };
    let (codes, slowest) = tokio::join!(attack, served);
    assert_eq!(codes.values().sum::<u32>(), 10_000);
    assert!(codes["ResourceExhausted"] > 8_000, "{codes:?}");
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    // Each of them is on record.
    let lines = world.audit.lines();
    assert_eq!(lines.len(), 10_020);
    assert_eq!(world.counts.lost(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_identities_at_once_are_not_slowed_and_a_node_that_asks_on_is_told_the_limit() {
    let world = serve(true, LimitSettings::default()).await;
    let (one, token) = (world.from(1).await, world.api.token_of_proxy(1));
    let calls = || futures_util::future::join_all((0..300).map(|_| ask(&one, &token, CART)));
    assert!(calls().await.iter().all(Result::is_ok));

    let limits = LimitSettings {
        burst: 100,
        rate: 1,
        ..LimitSettings::default()
    };
    let world = serve(true, limits).await;
    let (one, token) = (world.from(1).await, world.api.token_of_proxy(1));
    let outcomes = futures_util::future::join_all((0..300).map(|_| ask(&one, &token, CART))).await;
    let (granted, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert!((100..110).contains(&granted.len()), "{}", granted.len());
    for status in refused.into_iter().map(Result::unwrap_err) {
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("1 requests a second") && status.message().contains("100 at once"));
    }
    let (two, other) = (world.from(2).await, world.api.token_of_proxy(2));
    assert_eq!(code(ask(&two, &other, TILL).await), Code::Ok);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_whose_review_takes_forever_hold_up_only_whoever_sends_them() {
    let world = serve(true, LimitSettings::default()).await;
    let one = world.from(1).await;
    let bad: Vec<_> = (0..40).map(|_| world.api.token("x:y", &[])).collect();
    world.api.slow.lock().unwrap().extend(bad.iter().cloned());
    let attack = futures_util::future::join_all(bad.iter().map(|token| ask(&one, token, CART)));
    let served = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (two, other) = (world.from(2).await, world.api.token_of_proxy(2));
        let begin = Instant::now();
        assert_eq!(code(ask(&two, &other, TILL).await), Code::Ok);
        assert!(begin.elapsed() < Duration::from_secs(1));
    };
    let (outcomes, ()) = tokio::join!(attack, served);
    assert!(outcomes.into_iter().all(|outcome| code(outcome) == Code::Unavailable));
}
