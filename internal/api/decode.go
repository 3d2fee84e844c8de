package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// maxDepth of a body; ours have three levels.
const maxDepth = 8

// decode reads a body strictly: one JSON object in UTF-8, its members those of into and each once, none of them null. encoding/json alone
// would take members in any case, the last of two, and null for every type.
func decode(body []byte, into any) *problem {
	if len(bytes.TrimSpace(body)) == 0 {
		return kindMalformed.problem("the body is empty; it must be a JSON object")
	}
	if !utf8.Valid(body) {
		return kindMalformed.problem("the body is not UTF-8")
	}
	var syntax json.RawMessage
	if err := json.Unmarshal(body, &syntax); err != nil {
		return kindMalformed.problem("the body is not JSON: %s", err)
	}
	if p := checkShape(body); p != nil {
		return p
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		var wrongType *json.UnmarshalTypeError
		if errors.As(err, &wrongType) {
			return kindMalformed.problem("%s", strings.TrimSpace(fmt.Sprintf("a %s does not belong here: %s", wrongType.Value, wrongType.Field)))
		}
		return kindMalformed.problem("%s", strings.TrimPrefix(err.Error(), "json: "))
	}
	return nil
}

// checkShape walks through a body that is known to be JSON.
func checkShape(body []byte) *problem {
	type level struct {
		names  map[string]bool // of an object; nil: an array
		isName bool            // the next string is a name
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	var levels []level
	// taken says that a value is complete, so that a name comes next.
	taken := func() {
		if n := len(levels); n > 0 && levels[n-1].names != nil {
			levels[n-1].isName = true
		}
	}
	for {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return kindMalformed.problem("the body is not JSON: %s", err)
		}
		switch v := token.(type) {
		case json.Delim:
			if v == '}' || v == ']' {
				levels = levels[:len(levels)-1]
				taken()
				continue
			}
			if len(levels) == 0 && v == '[' {
				return kindMalformed.problem("the body is an array; it must be an object")
			}
			if len(levels) == maxDepth {
				return kindMalformed.problem("the body is nested deeper than %d levels", maxDepth)
			}
			next := level{}
			if v == '{' {
				next = level{names: map[string]bool{}, isName: true}
			}
			levels = append(levels, next)
		case string:
			if n := len(levels); n > 0 && levels[n-1].isName {
				top := &levels[n-1]
				if top.names[v] {
					return kindMalformed.problem("the member %q is there twice", v)
				}
				if !isMemberName(v) {
					return kindMalformed.problem("unknown field %q", v)
				}
				top.names[v], top.isName = true, false
				continue
			}
			// What encoding/json makes of half a surrogate pair. Two different ids could become one.
			if strings.ContainsRune(v, utf8.RuneError) {
				return kindInvalid.problem("a text has U+FFFD or an unpaired surrogate in it")
			}
			taken()
		case nil:
			return kindMalformed.problem("null is no value here; leave the member out")
		default:
			taken()
		}
	}
}

// isMemberName keeps out names that encoding/json would take for ours although they are spelt in another case.
func isMemberName(s string) bool {
	for _, r := range s {
		if (r < 'a' || r > 'z') && r != '_' {
			return false
		}
	}
	return s != ""
}
