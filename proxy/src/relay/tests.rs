//! What happens to one side while the other is stuck, on sockets of the loopback.

use std::io;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

use super::*;

const SOON: Duration = Duration::from_secs(5);
/// Longer than the bytes of a side that has reset may wait.
const LATER: Duration = Duration::from_millis(2200);
/// More than fits into the buffers on the way out of the relay, and less than into those on the way in.
const STUCK: usize = 192 << 10;

/// Both ends of a connection: the application's, and the relay's, which takes in much and gives out little.
async fn pair() -> (TcpStream, TcpStream) {
    let (applications, relays) = (TcpSocket::new_v4().unwrap(), TcpSocket::new_v4().unwrap());
    applications.set_recv_buffer_size(16 << 10).unwrap();
    relays.set_send_buffer_size(16 << 10).unwrap();
    relays.set_recv_buffer_size(2 * STUCK as u32).unwrap();
    applications.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = applications.listen(1).unwrap();
    let relays = relays.connect(listener.local_addr().unwrap()).await.unwrap();
    (listener.accept().await.unwrap().0, relays)
}

struct Bed {
    client: TcpStream,
    server: TcpStream,
}

struct Relayed {
    outcome: Outcome,
    sent: u64,
    received: u64,
}

/// Relays while `script` plays both applications.
async fn relayed(breaker: &Breaker, script: impl AsyncFnOnce(Bed)) -> Relayed {
    let ((client, from), (server, to)) = (pair().await, pair().await);
    let (from, to) = (AppStream::new(from), AppStream::new(to));
    let (sent, received) = (AtomicU64::new(0), AtomicU64::new(0));
    let relaying = async {
        let outcome = relay(from.split(), to.split(), &sent, &received, Some(breaker)).await;
        from.close_if(&outcome);
        to.close_if(&outcome);
        drop((from, to));
        outcome
    };
    let all = async { tokio::join!(relaying, script(Bed { client, server })) };
    let (outcome, ()) = timeout(2 * SOON, all).await.expect("the relay ends");
    Relayed {
        outcome,
        sent: sent.into_inner(),
        received: received.into_inner(),
    }
}

fn reset(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

/// Reads until the end: how much, and by what it ended.
async fn rest(stream: &mut TcpStream) -> (usize, Option<io::ErrorKind>) {
    let (mut all, mut buffer) = (0, vec![0; 64 << 10]);
    loop {
        match timeout(SOON, stream.read(&mut buffer)).await.expect("it ends") {
            Ok(0) => return (all, None),
            Ok(count) => all += count,
            Err(error) => return (all, Some(error.kind())),
        }
    }
}

const RESET: Option<io::ErrorKind> = Some(io::ErrorKind::ConnectionReset);

#[tokio::test]
async fn a_clients_reset_is_noticed_while_its_bytes_are_stuck() {
    let relayed = relayed(&Breaker::default(), async |mut bed: Bed| {
        bed.client.write_all(&[0; STUCK]).await.unwrap();
        reset(bed.client);
        sleep(LATER).await;
        let (count, ending) = rest(&mut bed.server).await;
        assert!(count < STUCK, "they were stuck");
        assert_eq!(ending, RESET);
    })
    .await;
    assert_eq!(relayed.outcome, Outcome::Broken(Side::Client, Fault::Reset));
}

#[tokio::test]
async fn a_servers_reset_is_noticed_while_its_bytes_are_stuck() {
    let relayed = relayed(&Breaker::default(), async |mut bed: Bed| {
        bed.server.write_all(&[0; STUCK]).await.unwrap();
        reset(bed.server);
        sleep(LATER).await;
        let (count, ending) = rest(&mut bed.client).await;
        assert!(count < STUCK, "they were stuck");
        assert_eq!(ending, RESET);
    })
    .await;
    assert_eq!(relayed.outcome, Outcome::Broken(Side::Server, Fault::Reset));
    assert!(relayed.received < STUCK as u64, "they were stuck");
}

#[tokio::test]
async fn a_clients_reset_is_noticed_by_way_of_a_server_that_has_ended_its_side() {
    let relayed = relayed(&Breaker::default(), async |mut bed: Bed| {
        bed.server.shutdown().await.unwrap();
        assert_eq!(rest(&mut bed.client).await, (0, None));
        bed.client.write_all(&[0; STUCK]).await.unwrap();
        reset(bed.client);
        sleep(LATER).await;
        assert_eq!(rest(&mut bed.server).await.1, RESET);
    })
    .await;
    assert_eq!(relayed.outcome, Outcome::Broken(Side::Client, Fault::Reset));
}

#[tokio::test]
async fn bytes_that_are_taken_in_time_come_before_the_reset() {
    let relayed = relayed(&Breaker::default(), async |mut bed: Bed| {
        bed.client.write_all(&[0; STUCK]).await.unwrap();
        reset(bed.client);
        sleep(Duration::from_millis(200)).await;
        // Not an end, which would pass the bytes off for all there were to be.
        assert_eq!(rest(&mut bed.server).await.1, RESET);
    })
    .await;
    assert_eq!(relayed.outcome, Outcome::Broken(Side::Client, Fault::Reset));
    assert_eq!(relayed.sent, STUCK as u64);
}

#[tokio::test]
async fn bytes_before_a_fin_wait_for_their_taker_though_a_reset_follows() {
    let relayed = relayed(&Breaker::default(), async |mut bed: Bed| {
        bed.client.write_all(&[0; STUCK]).await.unwrap();
        bed.client.shutdown().await.unwrap();
        // To close with bytes unread is to reset.
        bed.server.write_all(b"answer").await.unwrap();
        bed.client.readable().await.unwrap();
        drop(bed.client);
        sleep(LATER).await;
        rest(&mut bed.server).await;
    })
    .await;
    assert_eq!(relayed.outcome, Outcome::Broken(Side::Client, Fault::Reset));
    assert_eq!(relayed.sent, STUCK as u64);
}

#[tokio::test]
async fn bytes_and_a_fin_wait_as_long_as_it_takes() {
    let relayed = relayed(&Breaker::default(), async |mut bed: Bed| {
        bed.client.write_all(&[0; STUCK]).await.unwrap();
        bed.client.shutdown().await.unwrap();
        sleep(LATER).await;
        assert_eq!(rest(&mut bed.server).await, (STUCK, None));
        bed.server.shutdown().await.unwrap();
        assert_eq!(rest(&mut bed.client).await, (0, None));
    })
    .await;
    assert_eq!(relayed.outcome, Outcome::Closed(Side::Client));
}

#[tokio::test]
async fn what_is_cut_resets_both_sides_and_counts_what_has_passed() {
    let breaker = Breaker::default();
    let relayed = relayed(&breaker, async |mut bed: Bed| {
        bed.client.write_all(b"question").await.unwrap();
        bed.server.read_exact(&mut [0; 8]).await.unwrap();
        breaker.cut(Grounds::Policy, "for this reason");
        breaker.cut(Grounds::Policy, "and for no other");
        assert_eq!(rest(&mut bed.client).await, (0, RESET));
        assert_eq!(rest(&mut bed.server).await, (0, RESET));
    })
    .await;
    assert_eq!(
        relayed.outcome,
        Outcome::Cut(Grounds::Policy, "for this reason".to_owned())
    );
    assert_eq!((relayed.sent, relayed.received), (8, 0));
}

#[tokio::test]
async fn what_is_cut_before_it_begins_passes_nothing() {
    let breaker = Breaker::default();
    breaker.cut(Grounds::Policy, "too late");
    let relayed = relayed(&breaker, async |mut bed: Bed| {
        // The reset may have come already.
        let _ = bed.client.write_all(b"question").await;
        assert_eq!(rest(&mut bed.server).await, (0, RESET));
    })
    .await;
    assert_eq!(relayed.outcome, Outcome::Cut(Grounds::Policy, "too late".to_owned()));
    assert_eq!(relayed.sent, 0);
}

#[tokio::test]
async fn a_stuck_client_is_cut_too() {
    let breaker = Breaker::default();
    let relayed = relayed(&breaker, async |mut bed: Bed| {
        bed.client.write_all(&[0; STUCK]).await.unwrap();
        sleep(Duration::from_millis(100)).await;
        breaker.cut(Grounds::Policy, "stuck");
        assert_eq!(rest(&mut bed.client).await, (0, RESET));
        let (count, ending) = rest(&mut bed.server).await;
        assert!(count < STUCK);
        assert_eq!(ending, RESET);
    })
    .await;
    assert_eq!(relayed.outcome, Outcome::Cut(Grounds::Policy, "stuck".to_owned()));
    assert!(relayed.sent > 0, "what has passed of a chunk is counted");
}
