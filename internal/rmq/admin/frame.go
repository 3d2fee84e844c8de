package admin

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
)

// maxFrame bounds what is read for one answer. The broker's largest answer of the commands here, its configuration, is some 20 KB; a length
// above this is not RocketMQ speaking.
const maxFrame = 16 << 20

// responseFlag is the bit of a header's flag that marks an answer.
const responseFlag = 1

// command is one request or answer of RocketMQ's remoting protocol.
//
// On the wire it is: 4 bytes length of all that follows; 4 bytes, the first of which says how the header is encoded (0: JSON) and the other
// three how long it is; the header; the body. All numbers are big-endian.
type command struct {
	Code      int               `json:"code"`
	Language  string            `json:"language"`
	Version   int               `json:"version"`
	Opaque    int               `json:"opaque"` // ties an answer to its request
	Flag      int               `json:"flag"`
	Remark    string            `json:"remark,omitempty"`
	ExtFields map[string]string `json:"extFields,omitempty"`
	Encoding  string            `json:"serializeTypeCurrentRPC"`

	Body []byte `json:"-"`
}

func (c *command) encode() ([]byte, error) {
	header, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("encode header: %w", err)
	}
	length := 4 + len(header) + len(c.Body)
	if length > maxFrame {
		return nil, fmt.Errorf("encode request: %d bytes, at most %d", length, maxFrame)
	}
	frame := make([]byte, 0, 4+length)
	frame = binary.BigEndian.AppendUint32(frame, uint32(length))
	frame = binary.BigEndian.AppendUint32(frame, uint32(len(header))) //nolint:gosec // at most maxFrame, checked above
	frame = append(frame, header...)
	return append(frame, c.Body...), nil
}

// readCommand reads one frame. It never allocates more than maxFrame, whatever the other side claims.
func readCommand(r io.Reader) (*command, error) {
	var prefix [8]byte
	if _, err := io.ReadFull(r, prefix[:]); err != nil {
		return nil, fmt.Errorf("read frame: %w", err)
	}
	length := binary.BigEndian.Uint32(prefix[:4])
	encoding := prefix[4]
	headerLength := binary.BigEndian.Uint32(prefix[4:]) & 0xffffff
	if length < 4 || length > maxFrame {
		return nil, fmt.Errorf("read frame: length %d, want 4 to %d; is this a RocketMQ remoting port?", length, maxFrame)
	}
	if encoding != 0 {
		return nil, fmt.Errorf("read frame: header encoding %d, want 0 (JSON)", encoding)
	}
	if headerLength > length-4 {
		return nil, fmt.Errorf("read frame: header of %d bytes in a frame of %d", headerLength, length)
	}
	rest := make([]byte, length-4)
	if _, err := io.ReadFull(r, rest); err != nil {
		return nil, fmt.Errorf("read frame of %d bytes: %w", length, err)
	}
	c := new(command)
	if err := json.Unmarshal(rest[:headerLength], c); err != nil {
		return nil, fmt.Errorf("read frame: header: %w", err)
	}
	if body := rest[headerLength:]; len(body) > 0 {
		c.Body = body
	}
	return c, nil
}
