package api

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/lapse-orders/lapse/internal/sign"
)

// Scope is what a token allows.
type Scope string

// The scopes.
const (
	ScopePlace Scope = "place" // place, extend and cancel orders
	ScopePay   Scope = "pay"   // record payments
	ScopeRead  Scope = "read"  // read orders and their events
)

// Token is one bearer token. The token itself is not kept, only its hash.
type Token struct {
	// Name stands in the log and, as api:NAME, in the story of an order. 1 to 32 of a-z, 0-9, - and _.
	Name   string
	Scopes []Scope
	Hash   [sha256.Size]byte // SHA-256 of the token
}

// minSecret is the length of a token at least, as of a secret.
const minSecret = sign.MinSecret

// ParseTokens reads tokens, one a line or separated by semicolons: NAME SCOPES TOKEN, with the scopes separated by commas and the token
// either itself, of at least 16 characters, or as sha256: and the 64 hexadecimal digits of its hash. Empty lines, and those that begin
// with #, are passed over. Errors name the entry and never a token.
func ParseTokens(text string) ([]Token, error) {
	var tokens []Token
	entries := strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == ';' })
	for i, entry := range entries {
		words := strings.Fields(entry)
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		at := fmt.Sprintf("entry %d", i+1)
		if len(words) != 3 {
			return nil, fmt.Errorf("%s has %d words; expected a name, scopes, and a token", at, len(words))
		}
		t := Token{Name: words[0]}
		if len(t.Name) > 32 || strings.Trim(t.Name, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return nil, fmt.Errorf("%s: a name has 1 to 32 characters of a-z, 0-9, - and _", at)
		}
		if slices.ContainsFunc(tokens, func(other Token) bool { return other.Name == t.Name }) {
			return nil, fmt.Errorf("%s: the name %s is there twice", at, t.Name)
		}
		for s := range strings.SplitSeq(words[1], ",") {
			switch scope := Scope(s); scope {
			case ScopePlace, ScopePay, ScopeRead:
				t.Scopes = append(t.Scopes, scope)
			default:
				return nil, fmt.Errorf("%s (%s): the scopes are place, pay and read, separated by commas", at, t.Name)
			}
		}
		if digits, hashed := strings.CutPrefix(words[2], "sha256:"); hashed {
			sum, err := hex.DecodeString(digits)
			if err != nil || len(sum) != sha256.Size {
				return nil, fmt.Errorf("%s (%s): sha256: is followed by the 64 hexadecimal digits of the token's hash", at, t.Name)
			}
			copy(t.Hash[:], sum)
		} else {
			if len(words[2]) < minSecret {
				return nil, fmt.Errorf("%s (%s): the token has less than %d characters", at, t.Name, minSecret)
			}
			t.Hash = sha256.Sum256([]byte(words[2]))
		}
		if i := slices.IndexFunc(tokens, func(other Token) bool { return other.Hash == t.Hash }); i >= 0 {
			return nil, fmt.Errorf("%s (%s): its token is that of %s, so nobody could say who asks, and with which scopes", at, t.Name, tokens[i].Name)
		}
		tokens = append(tokens, t)
	}
	if len(tokens) == 0 {
		return nil, errors.New("there is no token in it")
	}
	return tokens, nil
}

// ParseSecrets reads the secrets of payment notices, one a line, each of at least 16 characters. Any of them signs a notice, so that a
// secret can be replaced without a gap.
func ParseSecrets(text string) ([]string, error) {
	var secrets []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		if len(line) < minSecret {
			return nil, fmt.Errorf("a secret has less than %d characters", minSecret)
		}
		secrets = append(secrets, line)
	}
	if len(secrets) == 0 {
		return nil, errors.New("there is no secret in it")
	}
	return secrets, nil
}

// authorize gives the name of whoever asks, or the problem. Without tokens everybody on the loopback may do everything.
func (s *Server) authorize(r *http.Request, need Scope) (actor string, p *problem) {
	if len(s.cfg.Tokens) == 0 {
		return "api", nil
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") || token == "" {
		return "", kindUnauthenticated.problem("send the header Authorization: Bearer TOKEN").with("WWW-Authenticate", `Bearer realm="lapse"`)
	}
	// Of hashes, and against all of them: neither the time it takes nor where it ends says how near a guess was.
	hash := sha256.Sum256([]byte(strings.TrimSpace(token)))
	found := -1
	for i := range s.cfg.Tokens {
		if subtle.ConstantTimeCompare(hash[:], s.cfg.Tokens[i].Hash[:]) == 1 {
			found = i
		}
	}
	if found < 0 {
		return "", kindUnauthenticated.problem("the token is not known").with("WWW-Authenticate", `Bearer realm="lapse", error="invalid_token"`)
	}
	t := s.cfg.Tokens[found]
	if !slices.Contains(t.Scopes, need) {
		return "", kindForbidden.problem("%s needs the scope %s; the token %s has not got it", r.Method, need, t.Name).
			with("WWW-Authenticate", fmt.Sprintf(`Bearer realm="lapse", error="insufficient_scope", scope="%s"`, need))
	}
	return "api:" + t.Name, nil
}

// checkSignature refuses a payment notice that nobody with a secret has signed just now. What is signed beside the body is the order's id,
// which is not in the body: a notice must not be turned to another order.
func (s *Server) checkSignature(r *http.Request, body []byte) *problem {
	if len(s.cfg.PaymentSecrets) == 0 {
		return nil
	}
	err := sign.Check(r.Header.Values(sign.Header), s.cfg.PaymentSecrets, r.PathValue("id"), body, s.cfg.now())
	switch {
	case errors.Is(err, sign.ErrMismatch):
		return kindBadSignature.problem("%s: it is HMAC-SHA-256 over the seconds, a dot, the order's id, a dot, and the body", err)
	case err != nil:
		return kindBadSignature.problem("%s", err)
	}
	return nil
}
