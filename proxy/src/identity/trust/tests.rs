//! Trust as handshakes see it: real certificates, real TLS, both roles.

mod files;
mod policy;
mod rotation;

use std::sync::Arc;

use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};
use rustls_pki_types::ServerName;

use super::{Role, Root, Trust};
use crate::identity::testing::TestCa;
use crate::identity::{Certificate, SpiffeId, explain_tls};

/// What one end says of a handshake: nothing, or why it failed.
type Word = Result<(), String>;

/// How a handshake went, as the one sees it whose verification is looked at, and as its peer does.
#[derive(Debug)]
struct Seen {
    judge: Word,
    peer: Word,
}

/// Shakes hands in memory and gives what server and client say.
fn shake(server: Arc<ServerConfig>, client: Arc<ClientConfig>) -> (Word, Word) {
    let mut server = ServerConnection::new(server).unwrap();
    let mut client = ClientConnection::new(client, ServerName::try_from("10.0.0.1").unwrap()).unwrap();
    let (mut of_server, mut of_client) = (Ok(()), Ok(()));
    for _ in 0..20 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        let mut left = &bytes[..];
        while !left.is_empty() && of_server.is_ok() {
            server.read_tls(&mut left).unwrap();
            of_server = server
                .process_new_packets()
                .map(|_| ())
                .map_err(|error| explain_tls(&error));
        }
        let mut bytes = Vec::new();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        let mut left = &bytes[..];
        while !left.is_empty() && of_client.is_ok() {
            client.read_tls(&mut left).unwrap();
            of_client = client
                .process_new_packets()
                .map(|_| ())
                .map_err(|error| explain_tls(&error));
        }
    }
    if of_server.is_ok() && of_client.is_ok() {
        assert!(!server.is_handshaking() && !client.is_handshaking());
    }
    (of_server, of_client)
}

/// `judge` looks at the certificate of `peer`, who is `role`, in a handshake where the peer expects and trusts the judge.
fn judged(judge: &Certificate, peer: &Certificate, role: Role) -> Seen {
    let (of_server, of_client) = match role {
        Role::Client => shake(judge.server_config(), peer.client_config(judge.id())),
        Role::Server => shake(peer.server_config(), judge.client_config(peer.id())),
    };
    match role {
        Role::Client => Seen {
            judge: of_server,
            peer: of_client,
        },
        Role::Server => Seen {
            judge: of_client,
            peer: of_server,
        },
    }
}

/// Both ways, each is both server and client.
fn assert_agree(one: &Certificate, other: &Certificate, what: &str) {
    for (server, client) in [(one, other), (other, one)] {
        let (of_server, of_client) = shake(server.server_config(), client.client_config(server.id()));
        assert_eq!((of_server, of_client), (Ok(()), Ok(())), "{what}");
    }
}

#[track_caller]
fn assert_refused(seen: &Seen, reason: &str) {
    let said = seen.judge.as_ref().expect_err(reason);
    assert!(said.contains(reason), "{said:?} has nothing of {reason:?}");
    assert!(seen.peer.is_err(), "the peer is told");
}

/// A trust in the roots of these authorities.
fn trusting(authorities: &[&TestCa]) -> Trust {
    Trust::of(&authorities.iter().map(|ca| ca.root()).collect::<Vec<Root>>())
}

fn of(domain: &str, account: &str) -> SpiffeId {
    SpiffeId::parse(&format!("spiffe://{domain}/ns/shop/sa/{account}")).unwrap()
}

const ROLES: [Role; 2] = [Role::Client, Role::Server];
