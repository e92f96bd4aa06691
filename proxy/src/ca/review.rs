//! Who calls, as the API server says: TokenReviews, each remembered for a moment.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_lc_rs::digest;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::counts::Counts;
use super::token::{Audience, Bound, Caller, MAX_TOKEN_BYTES, TokenError, account_of};
use crate::admin::Peer;
use crate::identity::BoxFuture;

/// How long a good token is taken for good: a node that starts asks for hundreds of certificates with one token. Whether
/// its pod is still there is looked at for each call, by the watch of pods.
const GOOD_FOR: Duration = Duration::from_secs(10);
/// How long a bad one is taken for bad.
const BAD_FOR: Duration = Duration::from_secs(1);
/// Tokens remembered at once: more nodes than a cluster has.
const MAX_REMEMBERED: usize = 20_000;
/// Reviews under way at once: garbage sent here must not become a flood for the API server.
const MAX_REVIEWS: usize = 16;
/// And of them from one address.
const MAX_REVIEWS_OF_PEER: usize = 2;
/// Addresses remembered at once.
const MAX_PEERS: usize = 4096;
/// How long a call waits for the API server's word.
const REVIEW_DEADLINE: Duration = Duration::from_secs(3);

const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
const NODE_UID: &str = "authentication.kubernetes.io/node-uid";

/// Asks for reviews; the API server, save in tests.
pub(super) trait Reviews: Send + Sync {
    /// What the API server says of a token for one of these audiences.
    fn review(&self, token: String, audiences: Vec<String>) -> BoxFuture<'_, Result<TokenReviewStatus, String>>;
}

impl Reviews for Client {
    fn review(&self, token: String, audiences: Vec<String>) -> BoxFuture<'_, Result<TokenReviewStatus, String>> {
        let api: Api<TokenReview> = Api::all(self.clone());
        let request = TokenReview {
            spec: TokenReviewSpec {
                audiences: Some(audiences),
                token: Some(token),
            },
            ..TokenReview::default()
        };
        Box::pin(async move {
            let answer = api
                .create(&PostParams::default(), &request)
                .await
                .map_err(|e| e.to_string())?;
            answer.status.ok_or_else(|| "an answer without a status".to_string())
        })
    }
}

/// What is known of one token. Held by the call that asks for the review, so that others with the same token wait for its
/// outcome instead of asking too.
type Slot = Arc<tokio::sync::Mutex<Option<(Result<Caller, TokenError>, Instant)>>>;
type TokenHash = [u8; digest::SHA256_OUTPUT_LEN];

/// Authenticates callers by TokenReview.
pub(super) struct Reviewer {
    reviews: Box<dyn Reviews>,
    audiences: Vec<String>,
    counts: Counts,
    turns: Semaphore,
    remembered: Mutex<HashMap<TokenHash, Slot>>,
    /// Turns of each address that has reviews under way.
    of_peers: Mutex<HashMap<Peer, Arc<Semaphore>>>,
}

impl Reviewer {
    pub(super) fn new(reviews: impl Reviews + 'static, audiences: Vec<String>, counts: Counts) -> Self {
        Self {
            reviews: Box::new(reviews),
            audiences,
            counts,
            turns: Semaphore::new(MAX_REVIEWS),
            remembered: Mutex::default(),
            of_peers: Mutex::default(),
        }
    }

    /// Authenticates the bearer of a token. May be dropped at any time.
    pub(super) async fn authenticate(&self, token: &str, peer: Option<IpAddr>) -> Result<Caller, TokenError> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(TokenError::TooLong(token.len()));
        }
        let expires = self.check_unverified(token)?;
        let slot = self.slot(token);
        let mut known = slot.lock().await;
        let now = Instant::now();
        if let Some((outcome, until)) = known.as_ref()
            && now < *until
        {
            return outcome.clone();
        }
        let outcome = self.review(token, peer).await;
        let left = expires.duration_since(SystemTime::now()).unwrap_or_default();
        let until = Instant::now() + remember_for(&outcome, left);
        *known = Some((outcome.clone(), until));
        outcome
    }

    /// What needs no word of the API server: that the token is for somebody else. Gives when it expires.
    fn check_unverified(&self, token: &str) -> Result<SystemTime, TokenError> {
        #[derive(serde::Deserialize)]
        struct Unverified {
            aud: Audience,
            exp: u64,
        }
        let claims: Unverified =
            jsonwebtoken::dangerous::insecure_decode_claims(token).map_err(|e| TokenError::Malformed(e.to_string()))?;
        let audiences = claims.aud.into_vec();
        if !audiences.iter().any(|audience| self.audiences.contains(audience)) {
            return Err(TokenError::Audience {
                expected: self.audiences.join(" or "),
                found: audiences,
            });
        }
        Ok(UNIX_EPOCH + Duration::from_secs(claims.exp.min(u64::from(u32::MAX))))
    }

    fn slot(&self, token: &str) -> Slot {
        let digest = digest::digest(&digest::SHA256, token.as_bytes());
        let mut hash = TokenHash::default();
        hash.copy_from_slice(digest.as_ref());
        let mut remembered = self.remembered.lock().unwrap_or_else(PoisonError::into_inner);
        if remembered.len() >= MAX_REMEMBERED {
            let now = Instant::now();
            remembered.retain(|_, slot| is_needed(slot, now));
            if remembered.len() >= MAX_REMEMBERED {
                remembered.clear();
            }
        }
        remembered.entry(hash).or_default().clone()
    }

    /// The turns of an address: one that sends nothing but garbage waits for itself, and not everybody for it.
    fn turns_of(&self, peer: Option<IpAddr>) -> Arc<Semaphore> {
        let mut of_peers = self.of_peers.lock().unwrap_or_else(PoisonError::into_inner);
        if of_peers.len() >= MAX_PEERS {
            of_peers.retain(|_, turns| Arc::strong_count(turns) > 1);
        }
        let turns = of_peers.entry(Peer::at(peer.unwrap_or(IpAddr::from([0; 4]))));
        turns
            .or_insert_with(|| Arc::new(Semaphore::new(MAX_REVIEWS_OF_PEER)))
            .clone()
    }

    async fn review(&self, token: &str, peer: Option<IpAddr>) -> Result<Caller, TokenError> {
        let of_peer = self.turns_of(peer);
        let answer = timeout(REVIEW_DEADLINE, async {
            let _turn_of_peer = of_peer.acquire().await.map_err(|e| e.to_string())?;
            let _turn = self.turns.acquire().await.map_err(|e| e.to_string())?;
            self.counts.reviewed();
            self.reviews.review(token.to_owned(), self.audiences.clone()).await
        });
        let status = answer
            .await
            .unwrap_or_else(|_| Err(format!("no answer within {} s", REVIEW_DEADLINE.as_secs())))
            .map_err(TokenError::Unreviewed)?;
        caller(status, &self.audiences)
    }
}

/// How long an outcome is remembered, of a token that is still valid for so long.
fn remember_for(outcome: &Result<Caller, TokenError>, left: Duration) -> Duration {
    match outcome {
        Ok(_) => GOOD_FOR.min(left),
        // An outage may be over the next time.
        Err(TokenError::Unreviewed(_)) => Duration::ZERO,
        Err(_) => BAD_FOR,
    }
}

/// Whether somebody waits at the slot, or what it holds is still good.
fn is_needed(slot: &Slot, now: Instant) -> bool {
    match slot.try_lock() {
        Ok(known) => known.as_ref().is_some_and(|(_, until)| now < *until),
        Err(_) => true,
    }
}

/// The caller, as a review tells of it.
fn caller(status: TokenReviewStatus, audiences: &[String]) -> Result<Caller, TokenError> {
    if status.authenticated != Some(true) {
        let reason = status.error.filter(|reason| !reason.is_empty());
        return Err(TokenError::Rejected(reason.unwrap_or_else(|| "no reason given".into())));
    }
    // An API server that knows no audiences says none: its word is then for itself only.
    let granted = status.audiences.unwrap_or_default();
    if !granted.iter().any(|audience| audiences.contains(audience)) {
        return Err(TokenError::Audience {
            expected: audiences.join(" or "),
            found: granted,
        });
    }
    let user = status.user.unwrap_or_default();
    let name = user.username.unwrap_or_default();
    let account = account_of(&name).ok_or(TokenError::Subject(name))?;
    let extra = user.extra.unwrap_or_default();
    Ok(Caller {
        account,
        pod: bound(&extra, POD_NAME, POD_UID),
        node: bound(&extra, NODE_NAME, NODE_UID),
    })
}

fn bound(extra: &BTreeMap<String, Vec<String>>, name: &str, uid: &str) -> Option<Bound> {
    let only = |key: &str| match extra.get(key).map(Vec::as_slice) {
        Some([value]) if !value.is_empty() => Some(value.clone()),
        _ => None,
    };
    Some(Bound {
        name: only(name)?,
        // Of a node only newer API servers say it, and names of nodes are unique.
        uid: only(uid).or_else(|| (name == NODE_NAME).then(String::new))?,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use k8s_openapi::api::authentication::v1::UserInfo;

    use super::*;

    /// An API server that says the same of every token, and counts.
    struct Says(Result<TokenReviewStatus, String>, Arc<AtomicUsize>);

    impl Reviews for Says {
        fn review(&self, _: String, _: Vec<String>) -> BoxFuture<'_, Result<TokenReviewStatus, String>> {
            Box::pin(async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                self.1.fetch_add(1, Ordering::Relaxed);
                self.0.clone()
            })
        }
    }

    fn status(username: &str, extra: &[(&str, &str)], audiences: &[&str]) -> TokenReviewStatus {
        TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(audiences.iter().map(|audience| (*audience).into()).collect()),
            error: None,
            user: Some(UserInfo {
                username: Some(username.into()),
                extra: Some(
                    extra
                        .iter()
                        .map(|(key, value)| (format!("authentication.kubernetes.io/{key}"), vec![(*value).into()]))
                        .collect(),
                ),
                ..UserInfo::default()
            }),
        }
    }

    fn good() -> TokenReviewStatus {
        let extra = [
            ("pod-name", "p"),
            ("pod-uid", "1"),
            ("node-name", "n"),
            ("node-uid", "2"),
        ];
        status("system:serviceaccount:adit-system:adit-node", &extra, &["adit-ca"])
    }

    /// A token that nobody has signed, for the audience and the next `seconds`.
    fn token(audience: &str, seconds: u64) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let claims = serde_json::json!({ "aud": [audience], "exp": now + seconds });
        let key = jsonwebtoken::EncodingKey::from_secret(b"nobody's").unwrap();
        jsonwebtoken::encode(&jsonwebtoken::Header::default(), &claims, &key).unwrap()
    }

    fn reviewer(answer: Result<TokenReviewStatus, String>) -> (Reviewer, Arc<AtomicUsize>) {
        let count = Arc::new(AtomicUsize::default());
        let says = Says(answer, count.clone());
        (Reviewer::new(says, vec!["adit-ca".into()], Counts::default()), count)
    }

    #[test]
    fn a_review_names_account_pod_and_node_and_nothing_is_made_up() {
        let audiences = ["adit-ca".to_owned()];
        let account = "system:serviceaccount:adit-system:adit-node";
        let pod = [("pod-name", "p"), ("pod-uid", "1")];
        let full = caller(good(), &audiences).unwrap();
        assert_eq!(full.account.to_string(), "adit-system/adit-node");
        assert_eq!(full.pod.unwrap().uid, "1");
        assert_eq!(full.node.unwrap().name, "n");
        let older = caller(status(account, &pod, &["adit-ca"]), &audiences).unwrap();
        assert!(older.pod.is_some() && older.node.is_none());
        // A name without a uid could be of a pod that was there before.
        let unbound = caller(status(account, &pod[..1], &["adit-ca"]), &audiences).unwrap();
        assert!(unbound.pod.is_none());

        for (what, review) in [
            (
                "not authenticated",
                TokenReviewStatus {
                    authenticated: Some(false),
                    ..good()
                },
            ),
            (
                "silent",
                TokenReviewStatus {
                    authenticated: None,
                    ..good()
                },
            ),
            ("for nobody", status(account, &pod, &[])),
            ("for somebody else", status(account, &pod, &["istio-ca"])),
            ("a user", status("jane", &pod, &["adit-ca"])),
            ("a node", status("system:node:n", &pod, &["adit-ca"])),
            ("an odd name", status("system:serviceaccount:a:b:c", &pod, &["adit-ca"])),
            ("an odd name", status("system:serviceaccount:a/b:c", &pod, &["adit-ca"])),
        ] {
            assert!(caller(review, &audiences).is_err(), "{what}");
        }
    }

    #[tokio::test]
    async fn three_hundred_calls_with_one_token_cost_one_review() {
        let (reviewer, count) = reviewer(Ok(good()));
        let token = token("adit-ca", 600);
        let calls = (0..300).map(|_| reviewer.authenticate(&token, None));
        let outcomes = futures_util::future::join_all(calls).await;
        assert!(outcomes.iter().all(Result::is_ok));
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_good_token_is_remembered_shortly_a_bad_one_for_less_and_an_outage_not_at_all() {
        let hour = Duration::from_secs(3600);
        let good = caller(good(), &["adit-ca".to_owned()]);
        for (outcome, left, expected) in [
            (good.clone(), hour, GOOD_FOR),
            (good.clone(), Duration::from_secs(3), Duration::from_secs(3)),
            (good, Duration::ZERO, Duration::ZERO),
            (Err(TokenError::Rejected("gone".into())), hour, BAD_FOR),
            (Err(TokenError::Unreviewed("away".into())), hour, Duration::ZERO),
        ] {
            assert_eq!(remember_for(&outcome, left), expected, "{outcome:?} {left:?}");
        }
    }

    #[tokio::test]
    async fn an_expired_token_is_not_remembered_as_good() {
        let (reviewer, count) = reviewer(Ok(good()));
        let token = token("adit-ca", 0);
        for _ in 0..2 {
            let _ = reviewer.authenticate(&token, None).await;
        }
        assert_eq!(count.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn what_is_no_token_for_us_never_reaches_the_api_server() {
        let (reviewer, count) = reviewer(Ok(good()));
        for token in ["", "garbage", "a.b.c", &token("istio-ca", 600), &"x".repeat(100_000)] {
            assert!(reviewer.authenticate(token, None).await.is_err());
        }
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }
}
