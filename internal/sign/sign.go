// Package sign signs what is sent over HTTP between lapse and a shop, in both directions: the notices of payments that come in, and the
// calls that go out to the shop's payment service.
//
// It is HMAC-SHA-256 with a shared secret, over the time, what the request is about, and the body as it is sent: no part of it can be
// changed, none can be turned to another order or another call, and a recorded request is worth nothing after some minutes.
package sign

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Header carries t=UNIX_SECONDS,v1=HEX. v1 is HMAC-SHA-256 with the secret over the seconds, a dot, the subject, a dot, and the body as it is
// sent.
const Header = "Lapse-Signature"

// Window is how far the time of a signature may lie from the clock of whoever checks it, either way.
const Window = 5 * time.Minute

// MinSecret is the length of a secret at least: 16 characters of a random text cannot be guessed over a network.
const MinSecret = 16

// Sign gives the value of the header. The subject is what the request is about and is not in its body.
func Sign(secret string, at time.Time, subject string, body []byte) string {
	seconds := strconv.FormatInt(at.Unix(), 10)
	return "t=" + seconds + ",v1=" + hex.EncodeToString(mac(secret, seconds, subject, body))
}

func mac(secret, seconds, subject string, body []byte) []byte {
	h := hmac.New(sha256.New, []byte(secret))
	h.Write([]byte(seconds + "." + subject + "."))
	h.Write(body)
	return h.Sum(nil)
}

// ErrMismatch is returned by Check where no secret made the signature.
var ErrMismatch = errors.New("the signature does not fit")

// Check refuses what nobody with one of the secrets has signed just now. values are those of the header. The error says what is wrong, and
// nothing about the secrets.
func Check(values, secrets []string, subject string, body []byte, now time.Time) error {
	if len(values) != 1 {
		return fmt.Errorf("send one header %s: t=UNIX_SECONDS,v1=HEX", Header)
	}
	var seconds string
	var signature []byte
	for part := range strings.SplitSeq(values[0], ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		switch name {
		case "t":
			seconds = value
		case "v1":
			var err error
			if signature, err = hex.DecodeString(value); err != nil {
				signature = nil // it is given up to the first character that is no digit
			}
		}
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil || len(signature) != sha256.Size {
		return fmt.Errorf("the header %s is not t=UNIX_SECONDS,v1=64 hexadecimal digits", Header)
	}
	matches := 0
	for _, secret := range secrets {
		if hmac.Equal(signature, mac(secret, seconds, subject, body)) {
			matches++
		}
	}
	if matches == 0 {
		return ErrMismatch
	}
	// Seconds are compared and not a difference of times, which would saturate.
	unixNow, window := now.Unix(), int64(Window/time.Second)
	if unix < unixNow-window || unix > unixNow+window {
		return fmt.Errorf("the signature's time lies more than %s from the server's, %d: sign again, and mind the clocks", Window, unixNow)
	}
	return nil
}
