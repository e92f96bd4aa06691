//! Certificates of a real istiod: to whom it gives them, in which layouts, and agents that carry traffic with them.

use std::fs;
use std::time::{Duration, Instant};

use adit::identity::{
    CaClient, CaSettings, CallOutcome, Certificate, IssueError, Issuer as _, SpiffeId, Trust, TrustDomain,
    TrustSettings,
};
use adit_tests::cluster::{Cluster, Istiod, PodSpec, SYSTEM, Signer, intermediates, owned_prefix};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_rustls::rustls::{self, pki_types::ServerName};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::ca::token;
use crate::stage::{
    PATIENCE, agent, assert_all_ok, await_access, await_captured, await_that, call, identity, strict_server,
};
use crate::world::World;

const AUDIENCE: &str = "istio-ca";

/// What an agent tells an authority, and what it reads to do so.
struct Agent<'a> {
    cluster: &'a Cluster,
    node: u8,
    settings: CaSettings,
    _files: TempDir,
}

impl<'a> Agent<'a> {
    /// One on a node, with this token, that believes these roots.
    fn new(istiod: &Istiod<'_>, cluster: &'a Cluster, node: u8, token: &str, roots: &str) -> Self {
        let files = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = files.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        Self {
            cluster,
            node,
            settings: CaSettings {
                address: istiod.address(),
                root: file("root.pem", roots),
                server_name: Some(Istiod::NAME.to_owned()),
                token: file("token", token),
                cluster_id: Istiod::CLUSTER_ID.to_owned(),
                ttl: Duration::from_secs(3600),
                ..CaSettings::default()
            },
            _files: files,
        }
    }

    /// Runs `work` with a client on the agent's node.
    fn with<T: Send>(&self, work: impl AsyncFnOnce(&CaClient) -> T + Send) -> T {
        let client = CaClient::new(self.settings.clone()).unwrap();
        let inside = || tokio_runtime().block_on(work(&client));
        self.cluster.node(self.node).inside(inside).unwrap()
    }

    fn ask(&self, identity: &str) -> Result<Certificate, IssueError> {
        let id = SpiffeId::parse(identity).unwrap();
        self.with(async |client| client.issue(&id).await.map(|issued| issued.certificate))
    }
}

fn tokio_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

fn account(cluster: &Cluster, namespace: &str, name: &str) {
    let metadata = json!({"name": name, "namespace": namespace});
    cluster
        .apply_json(&json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}))
        .unwrap();
}

/// Shakes hands as two agents' tunnels do; what the server's end made of it, and the client's.
fn shake_hands(client: &Certificate, server: &Certificate) -> (Result<(), String>, Result<(), String>) {
    tokio_runtime().block_on(async {
        let (near, far) = tokio::io::duplex(1 << 16);
        let connector = TlsConnector::from(client.client_config(server.id()));
        let acceptor = TlsAcceptor::from(server.server_config());
        let name = ServerName::try_from("10.0.0.1").unwrap();
        let (server, client) = tokio::join!(acceptor.accept(far), connector.connect(name, near));
        let told = |error: std::io::Error| match error.get_ref().and_then(|error| error.downcast_ref()) {
            Some(rustls::Error::InvalidCertificate(rustls::CertificateError::Other(reason))) => reason.0.to_string(),
            _ => error.to_string(),
        };
        (server.map(drop).map_err(told), client.map(drop).map_err(told))
    })
}

/// The names of the roots that came with a certificate.
fn roots(certificate: &Certificate) -> Vec<String> {
    let status = certificate.trust().status();
    status.roots.into_iter().map(|root| root.subject).collect()
}

#[test]
fn istiod_certifies_the_pods_of_the_callers_node_and_nobody_else() {
    let world = World::new("istiod");
    let (cluster, namespace) = (world.cluster, world.namespace.as_str());
    for name in ["agent", "cart", "till", "idle"] {
        account(cluster, namespace, name);
    }
    for (name, node, account) in [
        ("one", 1, "agent"),
        ("two", 2, "agent"),
        ("cart", 1, "cart"),
        ("till", 2, "till"),
    ] {
        let pod = PodSpec::new(name).namespace(namespace).node(node).account(account);
        cluster.create(&pod).unwrap();
    }
    for name in ["one", "two", "cart", "till"] {
        cluster.await_ready(namespace, &format!("pod/{name}")).unwrap();
    }
    let istiod = Istiod::start(cluster, &format!("{namespace}/agent"), Signer::Own).unwrap();
    let own_root = istiod.await_roots(namespace, None).unwrap();
    let token_of = |account, pod, audience| token(cluster, namespace, account, pod, audience);
    let agent = |node, token: &str| Agent::new(&istiod, cluster, node, token, &own_root);
    let (cart, till) = (identity(namespace, "cart"), identity(namespace, "till"));

    let (refused, unknown) = (Err(CallOutcome::PermissionDenied), Err(CallOutcome::Unauthenticated));
    let id = Istiod::CLUSTER_ID;
    for (what, (account, pod, audience), cluster_id, wanted, expected) in [
        (
            "a pod of its node",
            ("agent", Some("one"), AUDIENCE),
            id,
            "cart",
            Ok(()),
        ),
        (
            "a pod of the second node",
            ("agent", Some("two"), AUDIENCE),
            id,
            "till",
            Ok(()),
        ),
        (
            "a pod of another node",
            ("agent", Some("one"), AUDIENCE),
            id,
            "till",
            refused,
        ),
        ("nobody's", ("agent", Some("one"), AUDIENCE), id, "idle", refused),
        (
            "no account at all",
            ("agent", Some("one"), AUDIENCE),
            id,
            "absent",
            refused,
        ),
        (
            "not an agent's account",
            ("cart", Some("cart"), AUDIENCE),
            id,
            "cart",
            refused,
        ),
        ("bound to no pod", ("agent", None, AUDIENCE), id, "cart", refused),
        ("no cluster", ("agent", Some("one"), AUDIENCE), "", "cart", refused),
        (
            "another cluster",
            ("agent", Some("one"), AUDIENCE),
            "west",
            "cart",
            unknown,
        ),
        (
            "for somebody else",
            ("agent", Some("one"), "adit-ca"),
            id,
            "cart",
            unknown,
        ),
    ] {
        let mut agent = agent(1, &token_of(account, pod, audience));
        cluster_id.clone_into(&mut agent.settings.cluster_id);
        let answer = agent.ask(&identity(namespace, wanted));
        let outcome = answer.as_ref().map(drop).map_err(IssueError::outcome);
        assert_eq!(outcome, expected, "{what}: {answer:?}");
    }
    let garbage = agent(1, "garbage").ask(&cart).unwrap_err();
    assert_eq!(garbage.outcome(), CallOutcome::Unauthenticated, "{garbage}");

    // Its own root, alone: leaf and root.
    let [first, second] =
        [(1, "one"), (2, "two")].map(|(node, pod)| agent(node, &token_of("agent", Some(pod), AUDIENCE)));
    let (of_cart, of_till) = (first.ask(&cart).unwrap(), second.ask(&till).unwrap());
    assert_eq!(roots(&of_cart).len(), 1, "{:?}", roots(&of_cart));
    assert_eq!(shake_hands(&of_cart, &of_till), (Ok(()), Ok(())));

    // It would certify the pod under any trust domain. Whoever bears such a certificate is not one of ours, though its
    // chain leads to our root.
    let foreign = first
        .ask(&format!("spiffe://elsewhere/ns/{namespace}/sa/cart"))
        .unwrap();
    // It takes us for federated, so that it is we who refuse.
    let ours = (
        TrustDomain::parse("cluster.local").unwrap(),
        first.settings.root.clone(),
    );
    let federated = Trust::new(TrustSettings {
        foreign: vec![ours],
        ..TrustSettings::default()
    });
    let foreign = foreign.trusting(&federated).unwrap();
    let (server, _) = shake_hands(&foreign, &of_till);
    let error = server.unwrap_err();
    assert!(error.contains("trust domain"), "{error}");
    let (_, client) = shake_hands(&of_till, &foreign);
    let error = client.unwrap_err();
    assert!(error.contains("trust domain"), "{error}");

    // It is away, and comes back with what it had; and then with an intermediate below one root of two.
    first.with(async |client| {
        let cart = SpiffeId::parse(&cart).unwrap();
        client.issue(&cart).await.unwrap();
        istiod.stop().unwrap();
        let error = client.issue(&cart).await.map(drop).unwrap_err();
        assert_eq!(error.outcome(), CallOutcome::Unavailable, "{error}");
        istiod.run(Signer::Own).unwrap();
        issue_soon(client, &cart).await;
    });
    assert_eq!(istiod.await_roots(namespace, Some(&own_root)).unwrap(), own_root);
    let [one, _] = intermediates(cluster).unwrap();
    istiod.stop().unwrap();
    istiod.run(Signer::Folder(&one)).unwrap();
    let both = fs::read_to_string(one.join("root-cert.pem")).unwrap();
    istiod.await_roots(namespace, Some(&both)).unwrap();
    let agents = [("one", 1, &cart), ("two", 2, &till)].map(|(pod, node, id)| {
        let token = token_of("agent", Some(pod), AUDIENCE);
        let agent = Agent::new(&istiod, cluster, node, &token, &both);
        let id = SpiffeId::parse(id).unwrap();
        agent.with(async |client| issue_soon(client, &id).await)
    });
    for certificate in &agents {
        assert_eq!(&**certificate.issuer(), "CN=Adit test intermediate 1");
        assert_eq!(roots(certificate), ["CN=Adit test root 1", "CN=Adit test root 2"]);
    }
    let [of_cart, new_till] = agents;
    assert_eq!(shake_hands(&of_cart, &new_till), (Ok(()), Ok(())));
    // What it signed with its own root is of another mesh now.
    assert!(shake_hands(&of_cart, &of_till).0.is_err());
}

/// A certificate, as soon as an istiod that has just started knows the pods.
async fn issue_soon(client: &CaClient, id: &SpiffeId) -> Certificate {
    let begin = Instant::now();
    loop {
        match client.issue(id).await {
            Ok(issued) => return issued.certificate,
            Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[test]
fn agents_carry_traffic_with_certificates_of_istiod_while_it_is_away_and_across_a_change_of_its_root() {
    let cluster = Cluster::up(owned_prefix('i')).unwrap();
    let cluster = &cluster;
    cluster.namespace(SYSTEM, &[]).unwrap();
    let [one, two] = intermediates(cluster).unwrap();
    let istiod = Istiod::start(cluster, &format!("{SYSTEM}/adit-node"), Signer::Folder(&one)).unwrap();
    istiod.await_roots(SYSTEM, None).unwrap();
    let values = [
        "ca.enabled=false".to_owned(),
        format!("externalCA.address={}", istiod.address()),
        format!("externalCA.serverName={}", Istiod::NAME),
    ];
    let values = values.each_ref().map(String::as_str);
    cluster.install_adit(&values).unwrap();

    let server = strict_server(cluster, "shop");
    let client = |name: &str, account: &str| {
        let pod = PodSpec::new(name).namespace("shop").node(1).account(account);
        cluster.create(&pod).unwrap();
        cluster.await_ready("shop", &format!("pod/{name}")).unwrap();
    };
    client("client", "client");
    await_captured(cluster, "shop", "client", true);
    assert_all_ok(&call(cluster, "shop", "client", &server, &["--count", "20"]));
    let (from, to) = (identity("shop", "client"), identity("shop", "server"));
    let fields = [("source.identity", &*from), ("destination.identity", &*to)];
    let _ = await_access(cluster, 2, 1, &fields);
    assert_eq!(
        certified_by(cluster, 1, &from),
        (
            "CN=Adit test intermediate 1".to_owned(),
            "CN=Adit test root 1".to_owned()
        )
    );

    // It is away: what is certified goes on, and who comes new waits.
    istiod.stop().unwrap();
    account(cluster, "shop", "late");
    client("late", "late");
    assert_all_ok(&call(cluster, "shop", "client", &server, &["--count", "20"]));
    let more = ["--count", "1", "--timeout", "2000"];
    assert_eq!(call(cluster, "shop", "late", &server, &more).ok, 0);

    // It comes back with an intermediate below the other root, which all have known before.
    istiod.run(Signer::Folder(&two)).unwrap();
    await_that("the pod that came while istiod was away to be certified", || {
        call(cluster, "shop", "late", &server, &more).ok == 1
    });
    let late = identity("shop", "late");
    assert_eq!(
        certified_by(cluster, 1, &late),
        (
            "CN=Adit test intermediate 2".to_owned(),
            "CN=Adit test root 2".to_owned()
        )
    );
    assert_all_ok(&call(cluster, "shop", "client", &server, &["--count", "20"]));

    // All is well, in the words of `adit check`.
    let words = ["/adit", "check"];
    let said = cluster.exec(SYSTEM, &agent(cluster, 1), words).unwrap();
    assert!(said.contains("takes our token and grants"), "{said}");
    // And nobody else gets in.
    cluster.create(&PodSpec::new("out").node(1)).unwrap();
    cluster.await_ready("default", "pod/out").unwrap();
    assert_eq!(call(cluster, "default", "out", &server, &more).ok, 0);
    drop(istiod);
}

/// Who has signed the certificate that a node's agent has of an identity, and its root.
fn certified_by(cluster: &Cluster, node: u8, identity: &str) -> (String, String) {
    let words = ["/adit", "certs", "--json"];
    let said = cluster.exec(SYSTEM, &agent(cluster, node), words).unwrap();
    let all: Vec<Value> = serde_json::from_str(&said).unwrap();
    let one = all.iter().find(|one| one["identity"] == identity);
    let name = |field: &str| one.unwrap()[field].as_str().unwrap_or_default().to_owned();
    (name("issuer"), name("root"))
}
