//! The stream against itself and against rustls' own, over real sockets.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, BytesMut};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::handshake::Secrets;
use super::record::{ALERT, APPLICATION_DATA, HANDSHAKE, Keys, MAX_PLAINTEXT};
use super::{TlsStream, accept, connect};
use crate::identity::testing::{TestCa, id};

const SOON: Duration = Duration::from_secs(10);

fn configurations() -> (Arc<ClientConfig>, Arc<ServerConfig>) {
    let ca = TestCa::new();
    let (client, server) = (ca.certificate(&id("shop", "web")), ca.certificate(&id("shop", "cart")));
    (client.client_config(&id("shop", "cart")), server.server_config())
}

async fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, server) = tokio::join!(client, listener.accept());
    (client.unwrap(), server.unwrap().0)
}

/// Two of ours.
async fn ours() -> (TlsStream, TlsStream) {
    let ((client_config, server_config), (client, server)) = (configurations(), sockets().await);
    let (client, server) = tokio::join!(connect(client, client_config), accept(server, server_config));
    let ((client, shown_by_server), (server, shown_by_client)) = (client.unwrap(), server.unwrap());
    assert_eq!((shown_by_server.len(), shown_by_client.len()), (2, 2));
    (client, server)
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251) as u8).collect()
}

/// Sends both ways at once, in pieces that do and do not fill records, to the end.
async fn talk(
    mut one: impl AsyncRead + AsyncWrite + Unpin,
    mut other: impl AsyncRead + AsyncWrite + Unpin,
    sizes: &[usize],
) {
    let say = async |stream: &mut (dyn AsyncWriteAndRead + Unpin), hears_first: bool| {
        for size in sizes {
            let (sent, mut heard) = (pattern(*size), vec![0; *size]);
            if hears_first {
                stream.read_exact(&mut heard).await.unwrap();
            }
            stream.write_all(&sent).await.unwrap();
            stream.flush().await.unwrap();
            if !hears_first {
                stream.read_exact(&mut heard).await.unwrap();
            }
            assert!(heard == sent, "{size} bytes");
        }
        stream.shutdown().await.unwrap();
        assert_eq!(stream.read(&mut [0; 10]).await.unwrap(), 0, "the end");
    };
    let talk = async { tokio::join!(say(&mut one, false), say(&mut other, true)) };
    timeout(SOON, talk).await.unwrap();
}

trait AsyncWriteAndRead: AsyncRead + AsyncWrite {}
impl<T: AsyncRead + AsyncWrite> AsyncWriteAndRead for T {}

const SIZES: [usize; 11] = [
    1,
    2,
    100,
    MAX_PLAINTEXT - 1,
    MAX_PLAINTEXT,
    MAX_PLAINTEXT + 1,
    100_000,
    (256 << 10) - 1,
    1 << 20,
    3,
    5_000_000,
];

#[tokio::test]
async fn bytes_pass_between_two_of_ours() {
    let (client, server) = ours().await;
    talk(client, server, &SIZES).await;
}

#[tokio::test]
async fn bytes_pass_between_ours_and_rustls_own() {
    let ((client_config, server_config), (client, server)) = (configurations(), sockets().await);
    let name = ServerName::IpAddress(client.peer_addr().unwrap().ip().into());
    let theirs = TlsConnector::from(client_config.clone()).connect(name, client);
    let (theirs, ours) = tokio::join!(theirs, accept(server, server_config.clone()));
    talk(theirs.unwrap(), ours.unwrap().0, &SIZES).await;

    let (client, server) = sockets().await;
    let theirs = TlsAcceptor::from(server_config).accept(server);
    let (ours, theirs) = tokio::join!(connect(client, client_config), theirs);
    talk(ours.unwrap().0, theirs.unwrap(), &SIZES).await;
}

/// Session tickets follow a handshake, and early data of a server may come with it.
#[tokio::test]
async fn what_comes_right_behind_the_handshake_is_not_lost() {
    let ((client_config, server_config), (client, server)) = (configurations(), sockets().await);
    let mut with_tickets = ServerConfig::clone(&server_config);
    with_tickets.send_tls13_tickets = 4;
    with_tickets.ticketer = rustls::crypto::aws_lc_rs::Ticketer::new().unwrap();
    let theirs = async {
        let mut stream = TlsAcceptor::from(Arc::new(with_tickets)).accept(server).await.unwrap();
        stream.write_all(&pattern(100_000)).await.unwrap();
        stream.shutdown().await.unwrap();
    };
    let ours = async {
        let (mut stream, _) = connect(client, client_config).await.unwrap();
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).await.unwrap();
        assert!(heard == pattern(100_000));
    };
    timeout(SOON, async { tokio::join!(theirs, ours) }).await.unwrap();
}

#[tokio::test]
async fn a_handshake_in_single_bytes_succeeds() {
    let ((client_config, server_config), (client, server)) = (configurations(), sockets().await);
    let (inner, outer) = sockets().await;
    let slowly = async |mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf| {
        let mut byte = [0];
        while from.read(&mut byte).await.is_ok_and(|len| len == 1) && to.write_all(&byte).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    let ((a, b), (c, d)) = (server.into_split(), inner.into_split());
    let _up = tokio::spawn(slowly(a, d));
    let _down = tokio::spawn(slowly(c, b));
    let both = async { tokio::join!(connect(client, client_config), accept(outer, server_config)) };
    let (client, server) = timeout(SOON, both).await.unwrap();
    talk(client.unwrap().0, server.unwrap().0, &[10, 1000]).await;
}

#[tokio::test]
async fn keys_change_when_one_has_sealed_enough_and_when_the_peer_asks() {
    let (mut client, server) = ours().await;
    client.change_keys_after(3);
    talk(client, server, &[1, 100_000, 1_000_000, 1, 1]).await;

    let ((client_config, server_config), (client, server)) = (configurations(), sockets().await);
    let name = ServerName::IpAddress(client.peer_addr().unwrap().ip().into());
    let theirs = TlsConnector::from(client_config).connect(name, client);
    let (theirs, ours) = tokio::join!(theirs, accept(server, server_config));
    let (mut theirs, mut ours) = (theirs.unwrap(), ours.unwrap().0);
    ours.change_keys_after(2);
    for round in 0..20 {
        theirs.get_mut().1.refresh_traffic_keys().unwrap();
        let (up, down) = (pattern(1000 * round + 1), pattern(50_000));
        let (mut heard_up, mut heard_down) = (vec![0; up.len()], vec![0; down.len()]);
        theirs.write_all(&up).await.unwrap();
        theirs.flush().await.unwrap();
        ours.read_exact(&mut heard_up).await.unwrap();
        ours.write_all(&down).await.unwrap();
        theirs.read_exact(&mut heard_down).await.unwrap();
        assert!(heard_up == up && heard_down == down, "round {round}");
    }
    talk(theirs, ours, &[10]).await;
}

#[tokio::test]
async fn whoever_is_refused_is_told_and_the_one_who_refuses_keeps_the_reason() {
    let (web, cart) = (id("shop", "web"), id("shop", "cart"));
    let [known, unknown] = [(); 2].map(|()| TestCa::new());
    let (server_config, expected) = (known.certificate(&cart).server_config(), &cart);
    for (ca, expected) in [(&unknown, expected), (&known, &web)] {
        let (client, server) = sockets().await;
        let client = connect(client, ca.certificate(&web).client_config(expected));
        let (client, server) = tokio::join!(client, accept(server, server_config.clone()));
        let (client, server) = (client.err().unwrap().to_string(), server.err().unwrap().to_string());
        assert!(client.contains("certificate"), "{client}");
        assert!(server.contains("alert"), "{server}");
    }
}

/// The server's stream, and what the client's is made of: its socket, the keys by which the server knows it, and what makes
/// the next.
async fn handmade() -> (TlsStream, (TcpStream, Keys, Secrets)) {
    let (client, server) = ours().await;
    (server, client.into_parts())
}

fn sealed(keys: &mut Keys, kind: u8, content: &[u8]) -> BytesMut {
    let mut record = BytesMut::new();
    let append = |out: &mut BytesMut| out.put_slice(content);
    keys.seal(kind, content.len(), append, &mut record).unwrap();
    record
}

/// What reading comes to when this is sent.
async fn heard_of(make: impl FnOnce(&mut Keys) -> Vec<u8>) -> Result<Vec<u8>, String> {
    let (mut server, (mut tcp, mut keys, _)) = handmade().await;
    tcp.write_all(&make(&mut keys)).await.unwrap();
    tcp.shutdown().await.unwrap();
    let mut heard = Vec::new();
    let read = timeout(SOON, server.read_to_end(&mut heard)).await.unwrap();
    read.map(|_| heard).map_err(|error: io::Error| error.to_string())
}

#[tokio::test]
async fn hostile_records_end_the_connection_with_a_reason() {
    const GOODBYE: [u8; 2] = [1, 0];
    let well = |keys: &mut Keys| {
        [
            sealed(keys, APPLICATION_DATA, b"hello"),
            sealed(keys, APPLICATION_DATA, b""),
            sealed(keys, ALERT, &GOODBYE),
        ]
        .concat()
    };
    assert_eq!(heard_of(well).await.unwrap(), b"hello");

    type Make = fn(&mut Keys) -> Vec<u8>;
    let cases: [(&str, Make, &str); 13] = [
        (
            "cut off",
            |keys| sealed(keys, APPLICATION_DATA, b"x").to_vec(),
            "end of file",
        ),
        (
            "cut within a record",
            |keys| sealed(keys, APPLICATION_DATA, b"x")[..9].to_vec(),
            "end of file",
        ),
        (
            "changed on the way",
            |keys| {
                let mut record = sealed(keys, APPLICATION_DATA, b"hello");
                record[7] ^= 1;
                record.to_vec()
            },
            "cannot decrypt",
        ),
        (
            "sent twice",
            |keys| {
                let record = sealed(keys, APPLICATION_DATA, b"hello");
                [&record[..], &record[..]].concat()
            },
            "cannot decrypt",
        ),
        ("too long", |_| [23, 3, 3, 0x41, 0x01].to_vec(), "excess record size"),
        (
            "too short",
            |_| [23, 3, 3, 0, 16].iter().chain(&[0; 16]).copied().collect(),
            "cannot decrypt",
        ),
        (
            "not TLS",
            |_| b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            "UnknownProtocolVersion",
        ),
        (
            "change of cipher spec",
            |_| [20, 3, 3, 0, 1, 1].to_vec(),
            "ChangeCipherSpec",
        ),
        (
            "nothing but padding",
            |keys| sealed(keys, 0, &[0; 20]).to_vec(),
            "IllegalTlsInnerPlaintext",
        ),
        (
            "an alert",
            |keys| sealed(keys, ALERT, &[2, 44]).to_vec(),
            "CertificateRevoked",
        ),
        (
            "a ticket from a client",
            |keys| sealed(keys, HANDSHAKE, &[4, 0, 0, 1, 0]).to_vec(),
            "Handshake",
        ),
        (
            "something behind new keys",
            |keys| sealed(keys, HANDSHAKE, &[24, 0, 0, 1, 0, 24]).to_vec(),
            "KeyEpochWithPendingFragment",
        ),
        (
            "something between the parts of a message",
            |keys| [sealed(keys, HANDSHAKE, &[24, 0]), sealed(keys, APPLICATION_DATA, b"x")].concat(),
            "MessageInterleaved",
        ),
    ];
    for (what, make, says) in cases {
        let error = heard_of(make).await.unwrap_err();
        assert!(error.contains(says), "{what}: {error}");
    }
}

#[tokio::test]
async fn a_peer_that_asks_for_keys_without_end_and_takes_none_costs_no_memory() {
    let (mut server, (mut tcp, mut keys, mut secrets)) = handmade().await;
    for _ in 0..2_000 {
        tcp.write_all(&sealed(&mut keys, HANDSHAKE, &[24, 0, 0, 1, 1]))
            .await
            .unwrap();
        keys = secrets.next_to_send().unwrap();
        let nothing = timeout(Duration::ZERO, server.read(&mut [0])).await;
        assert!(nothing.is_err(), "{nothing:?}");
    }
    assert!(server.held() <= 300 << 10, "{} bytes", server.held());
}
