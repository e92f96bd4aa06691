//! The record layer of TLS 1.3 (RFC 8446, section 5): one direction's keys, and records sealed and opened with them.

use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use bytes::{BufMut as _, BytesMut};
use rustls::{AlertDescription, ConnectionTrafficSecrets, Error, InvalidMessage, PeerMisbehaved};

/// Content type, legacy version, length.
pub(super) const HEADER: usize = 5;
/// What the cipher adds to a record.
const TAG: usize = 16;
/// The most plaintext in one record.
pub(super) const MAX_PLAINTEXT: usize = 1 << 14;
/// The most that may stand after a header (section 5.2).
const MAX_SEALED: usize = MAX_PLAINTEXT + 256;
/// What sealing adds to plaintext: header, content type, tag.
pub(super) const OVERHEAD: usize = HEADER + 1 + TAG;

/// Content types.
pub(super) const CHANGE_CIPHER_SPEC: u8 = 20;
pub(super) const ALERT: u8 = 21;
pub(super) const HANDSHAKE: u8 = 22;
pub(super) const APPLICATION_DATA: u8 = 23;

/// The keys of one direction, and how many records they have sealed or opened.
pub(super) struct Keys {
    key: LessSafeKey,
    iv: [u8; NONCE_LEN],
    sequence: u64,
}

impl Keys {
    /// Takes what rustls has agreed on: the sequence number of the next record, and the secrets.
    pub(super) fn new((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, Error> {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            _ => return Err(Error::General("a cipher suite that was not offered".to_owned())),
        };
        let unusable = || Error::General("unusable secrets".to_owned());
        let key = UnboundKey::new(algorithm, key.as_ref()).map_err(|_| unusable())?;
        Ok(Self {
            key: LessSafeKey::new(key),
            iv: iv.as_ref().try_into().map_err(|_| unusable())?,
            sequence,
        })
    }

    /// How many records these keys have sealed or opened.
    pub(super) fn records(&self) -> u64 {
        self.sequence
    }

    /// Each is used once: the sequence number cannot come round before the keys are changed.
    fn next_nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        for (byte, counted) in nonce[NONCE_LEN - 8..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= counted;
        }
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Appends a record to `out`: of `kind`, with what `content` appends, which are `length` bytes.
    pub(super) fn seal(
        &mut self,
        kind: u8,
        length: usize,
        content: impl FnOnce(&mut BytesMut),
        out: &mut BytesMut,
    ) -> Result<(), Error> {
        let begin = out.len();
        let sealed = length + 1 + TAG;
        let [high, low] = u16::try_from(sealed)
            .map_err(|_| Error::General("a record too long".to_owned()))?
            .to_be_bytes();
        let header = [APPLICATION_DATA, 3, 3, high, low];
        out.reserve(HEADER + sealed);
        out.put_slice(&header);
        content(out);
        out.put_u8(kind);
        let nonce = self.next_nonce();
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(header), &mut out[begin + HEADER..])
            .map_err(|_| Error::EncryptError)?;
        out.put_slice(tag.as_ref());
        Ok(())
    }

    /// Opens a record into `out`, which takes [`opened_len`] bytes. Gives the content type and how many bytes are content.
    pub(super) fn open(&mut self, record: &[u8], out: &mut [u8]) -> Result<(u8, usize), Error> {
        let (header, sealed) = record.split_first_chunk::<HEADER>().ok_or(Error::DecryptError)?;
        let (ciphertext, tag) = sealed.split_last_chunk::<TAG>().ok_or(Error::DecryptError)?;
        let nonce = self.next_nonce();
        self.key
            .open_separate_gather(nonce, Aad::from(*header), ciphertext, tag, out)
            .map_err(|_| Error::DecryptError)?;
        // Padding follows the content type, zeros all.
        let end = out.iter().rposition(|byte| *byte != 0);
        let end = end.ok_or(Error::PeerMisbehaved(PeerMisbehaved::IllegalTlsInnerPlaintext))?;
        if end > MAX_PLAINTEXT {
            return Err(Error::PeerSentOversizedRecord);
        }
        Ok((out[end], end))
    }
}

/// How long the record is that the bytes begin with, header included; none if the header is not there yet.
pub(super) fn record_len(bytes: &[u8]) -> Result<Option<usize>, Error> {
    let Some((&[_, major, _, high, low], _)) = bytes.split_first_chunk::<HEADER>() else {
        return Ok(None);
    };
    if major != 3 {
        return Err(Error::InvalidMessage(InvalidMessage::UnknownProtocolVersion));
    }
    let len = usize::from(u16::from_be_bytes([high, low]));
    if len > MAX_SEALED {
        return Err(Error::PeerSentOversizedRecord);
    }
    Ok(Some(HEADER + len))
}

/// How much room opening a sealed record of this length takes; none where there is too little of it to be one.
pub(super) fn opened_len(record: usize) -> Option<usize> {
    record.checked_sub(HEADER + TAG).filter(|len| *len > 0)
}

/// What to tell a peer whose records end in this error (section 6.2).
pub(super) fn alert_for(error: &Error) -> AlertDescription {
    match error {
        Error::DecryptError => AlertDescription::BadRecordMac,
        Error::PeerSentOversizedRecord => AlertDescription::RecordOverflow,
        Error::InvalidMessage(_) => AlertDescription::DecodeError,
        Error::PeerMisbehaved(_) | Error::InappropriateMessage { .. } => AlertDescription::UnexpectedMessage,
        _ => AlertDescription::InternalError,
    }
}
